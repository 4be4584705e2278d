// A view's estimate equals a whole simulation from its snapshot, with and without jumps, whatever happened before.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "helpers.hpp"
#include "view.hpp"

using namespace simcluster;
using namespace simcluster::testing;

namespace {

// Fixed, so that every run and every machine tries the same.
struct Lcg {
  std::uint64_t state;
  std::int64_t below(std::int64_t n) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<std::int64_t>((state >> 33) % static_cast<std::uint64_t>(n));
  }
  bool once_in(std::int64_t n) { return below(n) == 0; }
  template <typename T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<std::int64_t>(values.size()))];
  }
};

SchedulerConfig random_config(Lcg& draw) {
  SchedulerConfig c;
  c.async_scheduling = draw.once_in(2);
  c.enable_prefix_caching = draw.once_in(2);
  c.block_size = draw.one_of({1, 4, 16});
  c.max_model_len = draw.one_of({64, 256, 4096});
  c.max_num_batched_tokens = draw.one_of({4, 8, 32, 128, 2048});
  c.max_num_seqs = draw.one_of({1, 2, 4, 16, 256});
  c.max_num_active_seqs = draw.one_of({0, 0, 0, 1, 3, 8});
  const std::int64_t needed = c.blocks_for(c.max_model_len);
  c.num_gpu_blocks = draw.one_of({needed + 1, needed / 2 + 2, needed / 4 + 2, 20 * needed});
  c.watermark = draw.one_of({0.0, 0.0, 0.1});
  c.scheduler_reserve_full_isl = !draw.once_in(3);
  if (draw.once_in(20)) c.policy = Policy::priority;
  if (draw.once_in(20)) c.long_prefill_token_threshold = 4;
  if (draw.once_in(20)) c.prefill_schedule_interval = 3;
  c.shared_prefixes = false;
  if (draw.once_in(20)) {
    c.enable_chunked_prefill = false;
    c.max_num_batched_tokens = std::max(c.max_num_batched_tokens, c.max_model_len);
  }
  return c;
}

StepTimeModel random_model(Lcg& draw) {
  StepTimeModel m;
  m.b0 = draw.one_of<Picoseconds>({10 * kMs, 5 * kMs, 1});
  m.b1 = draw.one_of<Picoseconds>({kMs, 25'000'000});
  m.b2 = draw.one_of<Picoseconds>({0, 45'000, 10'000'000});
  m.b3 = draw.one_of<Picoseconds>({0, 1'200});
  m.b1x = draw.one_of<Picoseconds>({0, 10'000'000});
  m.hinge_tokens = draw.one_of({0, 8, 64});
  m.b4 = draw.one_of<Picoseconds>({0, 1'000, 3'000'000});
  m.b5 = draw.one_of<Picoseconds>({0, 100'000'000});
  m.host = draw.one_of<Picoseconds>({0, kMs, 20 * kMs});
  return m;
}

// Tokens in flight of a request that waits are those of its entries in the batches in flight.
bool counts_what_is_in_flight(const Snapshot& shot) {
  std::vector<std::int64_t> tokens(shot.requests.size(), 0);
  for (const Snapshot::BatchInFlight& batch : shot.in_flight) {
    for (const Snapshot::Entry& entry : batch.entries) {
      if (entry.request >= 0) tokens[static_cast<std::size_t>(entry.request)] += entry.num_tokens;
    }
  }
  for (auto i = static_cast<std::size_t>(shot.num_running); i < tokens.size(); ++i) {
    const RequestState& r = shot.requests[i];
    if (r.num_inflight_tokens != tokens[i] || r.num_stale_tokens != tokens[i]) return false;
  }
  return true;
}

// One instance, a router that sends to it and others that do too.
struct World {
  Lcg draw;
  SchedulerConfig config;
  StepTimeModel model;
  Engine engine;
  InstanceView view;
  bool grid, foresight;  // arrivals on a grid; predictions come true and nobody else sends
  std::int64_t longest, next_id = 0;
  Picoseconds now = 0, delay;

  explicit World(std::uint64_t seed)
      : draw{seed},
        config(random_config(draw)),
        model(random_model(draw)),
        engine(config, draw.once_in(4) ? random_model(draw) : model),
        view(config, model, 1 + draw.below(40), !draw.once_in(8)),
        grid(draw.once_in(2)),
        foresight(draw.once_in(2)),
        longest(draw.one_of({2, 20, 200})),
        delay(draw.one_of<Picoseconds>({0, 0, kMs, 30 * kMs})) {}

  Dispatch request() {
    Dispatch d;
    d.id = next_id++;
    d.prompt_tokens = 1 + draw.below(std::min(config.max_model_len + 2, draw.one_of<std::int64_t>({4, 40, 600})));
    d.predicted_output = 1 + draw.below(longest);
    if (draw.once_in(3)) d.max_tokens = 1 + draw.below(longest);
    d.ends_by_length = draw.once_in(4);
    d.priority = draw.below(3);
    d.arrival_time = now;
    d.at = now + delay;
    if (draw.once_in(6)) d.at += grid ? 10 * kMs * draw.below(3) : draw.below(30 * kMs);
    return d;
  }

  void send(const Dispatch& d, bool known) {
    Submission s = ask(d.id, d.at, d.prompt_tokens, d.predicted_output);
    if (!known || !foresight) s.output_tokens = 1 + draw.below(longest);
    s.max_tokens = d.max_tokens;
    s.ends_by_length = d.ends_by_length;
    s.priority = d.priority;
    s.arrival_time = d.arrival_time;
    engine.submit(s);
    if (known) view.record_dispatch(d);
  }

  void wait() {
    const Picoseconds scale = draw.one_of<Picoseconds>({0, 0, kMs, 10 * kMs, 100 * kMs, 1000 * kMs});
    now += grid ? scale / (10 * kMs) * (10 * kMs) * draw.below(4) : scale * draw.below(1000) / 500;
    engine.advance_to(now);
  }

  void compare() {
    Dispatch candidate = request();
    if (draw.once_in(8)) candidate.at += draw.below(500) * kMs;
    const Picoseconds found = view.estimate_first_token(candidate);
    const Picoseconds again = view.estimate_first_token(candidate);
    const Picoseconds stepped = view.simulate_first_token(candidate, false);
    CHECK(found == stepped);
    CHECK(again == stepped);
    CHECK(view.simulate_first_token(candidate) == stepped);
    if (stepped < kNever && view.least().known) {
      const Picoseconds own = view.least().prompt(candidate.prompt_tokens);
      const Picoseconds past = view.least().past_hinge(candidate.prompt_tokens);
      const Outlook& known = view.outlook();
      CHECK(stepped >= candidate.at + view.least().batch + own);
      CHECK(stepped >= candidate.at + view.least().batch + own + past);
      if (candidate.at >= known.earliest) {
        const bool told = candidate.at <= known.until;
        CHECK(stepped >= (told ? known.at_least : known.at_least_later) + own);
        CHECK(stepped >= (told ? known.at_least_hinged : known.at_least_later) + own + past);
      }
    }
    if (draw.once_in(2)) send(candidate, true);
  }

  void play(std::int64_t moves) {
    std::shared_ptr<const Snapshot> held;  // a snapshot on its way to the router
    for (std::int64_t i = 0; i < moves; ++i) {
      wait();
      switch (draw.below(8)) {
        case 0:
          send(request(), true);
          break;
        case 1:
          if (!foresight) send(request(), false);
          break;
        case 2:
          if (draw.once_in(2)) {
            held = std::make_shared<const Snapshot>(Snapshot::capture(engine));
            CHECK(counts_what_is_in_flight(*held));
          }
          if (held) view.refresh(held);
          if (draw.once_in(4)) held = nullptr;
          break;
        default:
          compare();
      }
      if (failures > 0) return;
    }
  }
};

void play(std::int64_t seed) {
  World world(static_cast<std::uint64_t>(seed) * 7919);
  try {
    world.play(1 + world.draw.below(60));
  } catch (const LivelockError&) {  // two requests evict each other, as in the real scheduler
  }
  if (failures > 0) std::printf("world %lld\n", static_cast<long long>(seed));
}

}  // namespace

int main() {
  const char* given = std::getenv("SIMCLUSTER_WORKLOADS");
  const std::int64_t worlds = given != nullptr ? std::atoll(given) : 400;
  play(31'683);  // once, tokens of an evicted prefill stayed in flight for ever
  for (std::int64_t seed = 1; seed <= worlds && failures == 0; ++seed) play(seed);
  return report("frontier");
}
