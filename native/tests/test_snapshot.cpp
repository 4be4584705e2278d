#include <memory>
#include <stdexcept>
#include <tuple>

#include "check.hpp"
#include "helpers.hpp"
#include "snapshot.hpp"
#include "view.hpp"

using namespace simcluster;
using namespace simcluster::testing;

namespace {

bool same_events(const std::vector<Event>& a, const std::vector<Event>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i].id != b[i].id || a[i].at != b[i].at || a[i].value != b[i].value || a[i].kind != b[i].kind ||
        a[i].reason != b[i].reason) {
      return false;
    }
  }
  return true;
}

// Two running requests, one waiting behind them; the outputs are 6, 6 and 2 tokens.
Engine busy(bool async) {
  SchedulerConfig config = plain(async, 8);
  config.max_num_seqs = 2;
  Engine engine(config, u_step(), {}, EngineOptions{true, true});
  engine.submit(ask(0, 0, 4, 6));
  engine.submit(ask(1, 3 * kMs, 6, 6));
  engine.submit(ask(2, 5 * kMs, 3, 2));
  return engine;
}

std::vector<ExpectedEnd> true_ends(const Snapshot& shot) {
  std::vector<ExpectedEnd> ends;
  for (const RequestState& r : shot.requests) ends.push_back({r.id == 2 ? 2 : 6, false});
  return ends;
}

void a_restored_engine_continues_exactly() {
  for (const bool async : {false, true}) {
    for (Picoseconds t = 6 * kMs; t < 150 * kMs; t += kMs / 2) {
      Engine engine = busy(async);
      engine.advance_to(t);
      engine.events().clear();
      const Snapshot shot = Snapshot::capture(engine);
      Engine copy(engine.scheduler().config(), u_step(), {}, EngineOptions{true, true});
      shot.restore(copy, true_ends(shot));
      for (std::int64_t id = 1; id < 3; ++id) {  // what had not reached the engine is not in the snapshot
        const Picoseconds at = id == 1 ? 3 * kMs : 5 * kMs;
        if (at > shot.intake) copy.submit(ask(id, at, id == 1 ? 6 : 3, id == 1 ? 6 : 2));
      }
      engine.drain();
      copy.drain();
      CHECK(same_events(engine.events(), copy.events()));
      CHECK(copy.scheduler().num_free_blocks() == 8);
    }
  }
}

// Four requests on blocks for two of them, so that the tail is preempted and decodes join lockstep again and again.
void a_restored_engine_without_blocks_to_spare_continues_in_lockstep() {
  for (const bool async : {false, true}) {
    const auto fill = [](Engine& engine, Picoseconds after) {
      for (std::int64_t id = 0; id < 4; ++id) {
        if (id * 4 * kMs > after) engine.submit(ask(id, id * 4 * kMs, 4, 9 + id));
      }
    };
    Engine engine(plain(async, 7), u_step());
    fill(engine, -1);
    for (Picoseconds t = 0; t < 400 * kMs; t += kMs / 2) {
      engine.advance_to(t);
      engine.events().clear();
      const Snapshot shot = Snapshot::capture(engine);
      std::vector<ExpectedEnd> ends;
      for (const RequestState& r : shot.requests) ends.push_back({9 + r.id, false});
      Engine copy(engine.scheduler().config(), u_step());
      shot.restore(copy, ends);
      fill(copy, shot.intake);
      Engine rest = engine;
      rest.drain();
      copy.drain();
      CHECK(same_events(rest.events(), copy.events()));
      CHECK(copy.scheduler().num_free_blocks() == 7);
    }
    CHECK(engine.scheduler().num_preemptions() > 0 && engine.scheduler().num_running() == 0);
  }
}

void a_snapshot_hides_the_true_ends() {
  Engine engine = busy(false);
  engine.advance_to(30 * kMs);
  const Snapshot shot = Snapshot::capture(engine);
  CHECK(shot.requests.size() == 3 && shot.num_running == 2);
  for (const RequestState& r : shot.requests) CHECK(r.max_tokens == 40960 - r.num_prompt_tokens && r.eos_at == 0);
}

void what_cannot_be_restored_is_refused() {
  Engine engine = busy(false);
  engine.advance_to(30 * kMs);
  Snapshot shot = Snapshot::capture(engine);
  Engine copy(plain(false, 8), u_step());
  CHECK(throws<std::invalid_argument>([&] { shot.restore(copy, {}); }));
  SchedulerConfig exact = plain(false, 8);
  exact.track_blocks = true;
  Engine with_tables(exact, u_step());
  CHECK(throws<std::invalid_argument>([&] { shot.restore(with_tables, true_ends(shot)); }));
  shot.version += 1;
  CHECK(throws<std::invalid_argument>([&] { shot.restore(copy, true_ends(shot)); }));
}

// The real step takes 104 ms, the believed one 14 ms; at 50 ms it is known that it still runs.
void a_step_that_runs_longer_than_believed_ends_when_the_snapshot_was_taken() {
  for (const bool async : {false, true}) {
    StepTimeModel slow = u_step();
    slow.b0 = 100 * kMs;
    Engine engine(plain(async), slow);
    engine.submit(ask(0, 0, 4, 3));
    engine.advance_to(50 * kMs);
    const Snapshot shot = Snapshot::capture(engine);
    Engine copy(engine.scheduler().config(), u_step(), {}, EngineOptions{true, true});
    shot.restore(copy, {{3, false}});
    copy.drain();
    CHECK(tokens_of(copy, 0) == (std::vector<Picoseconds>{50, 61, 72}));
  }
}

void an_estimate_from_a_fresh_snapshot_is_what_happens() {
  for (const bool async : {false, true}) {
    for (Picoseconds t = 0; t < 150 * kMs; t += kMs) {
      Engine engine = busy(async);
      InstanceView view(engine.scheduler().config(), u_step(), 3, true);
      for (const auto& [id, at, prompt, output] :
           {std::tuple{0, 0, 4, 6}, std::tuple{1, 3, 6, 6}, std::tuple{2, 5, 3, 2}}) {
        view.record_dispatch({id, prompt, output, -1, false, 0, 0, at * kMs});
      }
      engine.advance_to(t);
      view.refresh(std::make_shared<const Snapshot>(Snapshot::capture(engine)));
      const Picoseconds estimate = view.estimate_first_token({9, 5, 4, -1, false, 0, 0, t});
      CHECK(estimate == view.estimate_first_token({9, 5, 4, -1, false, 0, 0, t}));  // nothing is left behind
      engine.submit(ask(9, t, 5, 4));
      CHECK(estimate == engine.run_to_first_token(9));
    }
  }
}

// The prefill is evicted by the decode in front of it while a chunk of it is in flight, and does not fit until that ends.
void an_evicted_prefill_has_no_tokens_in_flight_once_their_results_are_in() {
  for (const std::int64_t block_size : {1, 4}) {
    SchedulerConfig config = plain(true, 46 / block_size, block_size);
    config.max_num_batched_tokens = 8;
    Engine fast(config, u_step()), stepping(config, u_step(), {}, EngineOptions{false, false, false});
    for (Engine* engine : {&fast, &stepping}) {
      engine->submit(ask(0, 0, 4, 30));
      engine->submit(ask(1, 0, 40, 5));
    }
    for (const Picoseconds t : {200 * kMs, 700 * kMs}) {
      fast.advance_to(t);
      stepping.advance_to(t);
      const Snapshot shot = Snapshot::capture(fast);
      CHECK(shot.requests == Snapshot::capture(stepping).requests);
      if (t != 200 * kMs) continue;
      CHECK(shot.requests.size() == 2 && shot.num_running == 1);
      const RequestState& evicted = shot.requests.back();
      CHECK(evicted.status == Status::preempted && evicted.num_inflight_tokens == 0 && evicted.num_stale_tokens == 0);
    }
    fast.drain();
    stepping.drain();
    CHECK(same_events(fast.events(), stepping.events()));
  }
}

}  // namespace

int main() {
  a_restored_engine_continues_exactly();
  a_restored_engine_without_blocks_to_spare_continues_in_lockstep();
  a_snapshot_hides_the_true_ends();
  what_cannot_be_restored_is_refused();
  a_step_that_runs_longer_than_believed_ends_when_the_snapshot_was_taken();
  an_estimate_from_a_fresh_snapshot_is_what_happens();
  an_evicted_prefill_has_no_tokens_in_flight_once_their_results_are_in();
  return report("snapshot");
}
