// Small runs computed by hand.
#include "check.hpp"
#include "helpers.hpp"

using namespace simcluster;
using namespace simcluster::testing;

namespace {

using Times = std::vector<Picoseconds>;

Engine engine_with(const SchedulerConfig& config) {
  return Engine(config, u_step(), {}, EngineOptions{true, true});
}

void decodes_ride_in_every_chunk_step() {
  SchedulerConfig config = plain(false);
  config.max_num_batched_tokens = 6;
  Engine engine = engine_with(config);
  engine.submit(ask(0, 0, 2, 5));
  engine.submit(ask(1, kMs, 12, 1));
  engine.drain();
  CHECK((tokens_of(engine, 0) == Times{12, 28, 44, 57, 68}));
  CHECK((tokens_of(engine, 1) == Times{57}));
  CHECK(engine.num_steps() == 5 && engine.busy_time() == 68 * kMs);
}

void the_tail_is_preempted_and_resumes_with_what_it_had() {
  SchedulerConfig config = plain(false, 3);
  config.max_num_batched_tokens = 16;
  Engine engine = engine_with(config);
  engine.submit(ask(0, 0, 4, 3));
  engine.submit(ask(1, 0, 4, 3));
  engine.drain();
  CHECK((tokens_of(engine, 0) == Times{18, 29, 40}));
  CHECK((tokens_of(engine, 1) == Times{18, 55, 66}));
  CHECK(engine.scheduler().num_preemptions() == 1);
  CHECK(engine.scheduler().num_free_blocks() == 3);
}

// The second request arrives at 13, when the batch of 14-25 is queued already, so it joins the one after. Nobody foresees
// the two ends at 39, so both requests are in the batch of 39-51 for nothing.
void the_asynchronous_loop_keeps_two_batches_in_flight() {
  Engine engine = engine_with(plain(true));
  engine.submit(ask(0, 0, 4, 3));
  engine.submit(ask(1, 13 * kMs, 3, 1));
  engine.drain();
  CHECK((tokens_of(engine, 0) == Times{14, 25, 39}));
  CHECK((tokens_of(engine, 1) == Times{39}));
  const std::vector<StepRecord>& steps = engine.steps();
  CHECK(steps.size() == 4);
  CHECK(steps[1].start == 14 * kMs && steps[1].features.num_tokens == 1);
  CHECK(steps[2].start == 25 * kMs && steps[2].features.num_tokens == 4);
  CHECK(steps[3].start == 39 * kMs && steps[3].end == 51 * kMs && steps[3].features.num_tokens == 2);
}

void a_known_end_wastes_no_token_in_the_asynchronous_loop() {
  Engine engine = engine_with(plain(true));
  Submission s = ask(0, 0, 4, 3);
  s.ends_by_length = true;
  engine.submit(s);
  engine.drain();
  CHECK((tokens_of(engine, 0) == Times{14, 25, 36}));
  CHECK(engine.num_steps() == 3);
  CHECK(last_event(engine, 0).reason == EndReason::length);
}

// Only counters change in most of the 2,000 decodes; the engine runs over them in closed form.
void a_long_answer_ends_when_its_steps_add_up() {
  for (const bool async : {false, true}) {
    for (const bool fast : {false, true}) {
      StepTimeModel model = u_step();
      model.b2 = 1'000'000;  // 1 us per token of context
      Engine engine(plain(async), model, {}, EngineOptions{false, false, fast});
      Submission s = ask(0, 0, 4, 2001);
      s.ends_by_length = true;
      engine.submit(s);
      engine.advance_to(1000 * kMs);
      engine.drain();
      const Picoseconds contexts = 2000 * 4 + 2000 * 1999 / 2;
      CHECK(last_event(engine, 0).at == 14 * kMs + 2000 * 11 * kMs + contexts * model.b2);
      CHECK(engine.num_steps() == 2001);
      CHECK(engine.busy_time() == last_event(engine, 0).at);
      CHECK(engine.scheduler().num_free_blocks() == 1000);
    }
  }
}

void an_outgrown_pool_ends_the_request_as_failed() {
  for (const bool async : {false, true}) {
    Engine engine = engine_with(plain(async, 2));
    engine.submit(ask(0, 0, 4, 10));
    engine.drain();
    CHECK((tokens_of(engine, 0) == Times{14, 25, 36, 47, 58}));
    const Event end = last_event(engine, 0);
    CHECK(end.kind == EventKind::failed && end.reason == EndReason::kv_capacity && end.value == 5);
  }
}

void a_cancellation_is_applied_before_the_results_of_the_step() {
  Engine engine = engine_with(plain(false));
  engine.submit(ask(0, 0, 4, 100));
  engine.cancel(0, 20 * kMs);
  engine.submit(ask(1, 21 * kMs, 4, 1));
  CHECK(engine.next_event() == 0);
  engine.drain();
  CHECK((tokens_of(engine, 0) == Times{14}));
  CHECK(last_event(engine, 0).at == 20 * kMs);
  CHECK((tokens_of(engine, 1) == Times{39}));
}

void a_step_that_starts_at_the_horizon_waits() {
  Engine engine = engine_with(plain(false));
  engine.submit(ask(0, 0, 4, 2));
  engine.advance_to(0);
  CHECK(engine.events().empty() && engine.num_pending() == 1);
  engine.advance_to(14 * kMs);
  CHECK((tokens_of(engine, 0) == Times{14}));
  CHECK(engine.num_steps() == 1);
  CHECK(engine.next_event() == 25 * kMs);
  engine.submit(ask(1, 14 * kMs, 4, 1));
  engine.drain();
  CHECK((tokens_of(engine, 1) == Times{29}));
}

void a_copy_is_a_fork_of_the_future() {
  Engine engine = engine_with(plain(false));
  engine.submit(ask(0, 0, 4, 3));
  engine.advance_to(15 * kMs);
  Engine fork = engine;
  fork.cancel(0, 16 * kMs);
  fork.drain();
  engine.drain();
  CHECK(last_event(fork, 0).kind == EventKind::failed);
  CHECK((tokens_of(engine, 0) == Times{14, 25, 36}));
}

void two_requests_that_evict_each_other_are_named() {
  SchedulerConfig config = plain(false, 5, 1);
  config.policy = Policy::priority;
  config.scheduler_reserve_full_isl = false;
  config.long_prefill_token_threshold = 1;
  config.max_num_batched_tokens = 2;
  Engine engine = engine_with(config);
  engine.submit(ask(7, 0, 4, 1));
  engine.submit(ask(8, 0, 5, 1));
  CHECK(throws<LivelockError>([&] { engine.drain(); }));
}

}  // namespace

int main() {
  decodes_ride_in_every_chunk_step();
  the_tail_is_preempted_and_resumes_with_what_it_had();
  the_asynchronous_loop_keeps_two_batches_in_flight();
  a_known_end_wastes_no_token_in_the_asynchronous_loop();
  a_long_answer_ends_when_its_steps_add_up();
  an_outgrown_pool_ends_the_request_as_failed();
  a_cancellation_is_applied_before_the_results_of_the_step();
  a_step_that_starts_at_the_horizon_waits();
  a_copy_is_a_fork_of_the_future();
  two_requests_that_evict_each_other_are_named();
  return report("engine");
}
