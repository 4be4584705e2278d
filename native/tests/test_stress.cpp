// Random engines under the sanitizers: nothing is lost, no block leaks, and copies and jumps agree with stepping.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <tuple>

#include "check.hpp"
#include "helpers.hpp"
#include "snapshot.hpp"
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
};

SchedulerConfig random_config(Lcg& draw) {
  SchedulerConfig config;
  config.async_scheduling = draw.once_in(2);
  config.enable_prefix_caching = draw.once_in(2);
  config.track_blocks = draw.once_in(8);
  config.shared_prefixes = draw.once_in(2);
  config.policy = draw.once_in(4) ? Policy::priority : Policy::fcfs;
  config.vllm_version = draw.once_in(4) ? VllmVersion::v0_32 : VllmVersion::v0_33;
  config.block_size = 1 + draw.below(6);
  config.num_gpu_blocks = 3 + draw.below(draw.once_in(2) ? 40 : 400);
  config.max_num_batched_tokens = 1 + draw.below(40);
  config.max_num_seqs = 1 + draw.below(12);
  config.max_num_active_seqs = draw.once_in(4) ? 1 + draw.below(4) : 0;
  config.max_model_len = 20 + draw.below(300);
  config.long_prefill_token_threshold = draw.once_in(4) ? 1 + draw.below(8) : 0;
  config.long_prefill_token_threshold_adaptive = draw.once_in(2);
  config.prefill_schedule_interval = draw.once_in(4) ? 1 + draw.below(4) : 1;
  config.watermark = draw.once_in(3) ? 0.1 * static_cast<double>(draw.below(5)) : 0.0;
  config.scheduler_reserve_full_isl = !draw.once_in(3);
  config.enable_chunked_prefill = !draw.once_in(4);
  if (!config.enable_chunked_prefill) config.max_num_batched_tokens += config.max_model_len;
  return config;
}

Submission random_request(Lcg& draw, const SchedulerConfig& config, std::int64_t id, Picoseconds after) {
  Submission s = ask(id, after + draw.below(60) * kMs, 1 + draw.below(60), 1 + draw.below(draw.once_in(2) ? 20 : 200));
  s.ends_by_length = draw.once_in(2);
  s.max_tokens = draw.once_in(4) ? 1 + draw.below(30) : -1;
  s.priority = draw.below(3);
  s.arrival_time = s.at * 1000 + id;  // distinct: equal keys may livelock, as in the real scheduler
  if (config.shared_prefixes && draw.once_in(2)) {
    const std::int64_t shared = std::min<std::int64_t>(s.prompt_tokens, 1 + draw.below(24));
    s.prompt.push_back({1000 * static_cast<std::uint64_t>(1 + draw.below(3)), shared});
    if (shared < s.prompt_tokens) {
      s.prompt.push_back({100'000 + 100 * static_cast<std::uint64_t>(id), s.prompt_tokens - shared});
    }
  }
  return s;
}

// Everything told but single tokens, which an engine that jumps leaves out.
std::vector<Event> told(const Engine& engine) {
  std::vector<Event> events;
  for (const Event& e : engine.events()) {
    if (e.kind != EventKind::token) events.push_back(e);
  }
  return events;
}

bool same(const Event& a, const Event& b) {
  return a.id == b.id && a.at == b.at && a.value == b.value && a.kind == b.kind && a.reason == b.reason;
}

void agree(const Engine& a, const Engine& b) {
  const std::vector<Event> first = told(a), second = told(b);
  CHECK(std::equal(first.begin(), first.end(), second.begin(), second.end(), same));
  CHECK(a.num_steps() == b.num_steps() && a.busy_time() == b.busy_time());
  CHECK(a.scheduler().num_free_blocks() == b.scheduler().num_free_blocks());
  CHECK(a.scheduler().num_running() == b.scheduler().num_running());
  CHECK(a.scheduler().num_preemptions() == b.scheduler().num_preemptions());
}

std::map<std::int64_t, int> ends_of(const Engine& engine) {
  std::map<std::int64_t, int> ends;
  for (const Event& e : engine.events()) {
    if (e.kind == EventKind::finished || e.kind == EventKind::rejected || e.kind == EventKind::failed) ++ends[e.id];
  }
  return ends;
}

// What follows from a snapshot and expected ends, by restoring into an engine and running on.
struct Future {
  Picoseconds first = 0;
  std::vector<Event> events;
  std::int64_t free_blocks = 0;
};

Future future_of(const Snapshot& shot, const std::vector<ExpectedEnd>& ends, const SchedulerConfig& config,
                 const Submission& candidate, bool fast) {
  Engine engine(config, u_step(), {}, EngineOptions{false, false, fast});
  shot.restore(engine, ends);
  Future future;
  engine.submit(candidate);
  try {
    future.first = engine.run_to_first_token(candidate.id);
    engine.drain();
  } catch (const LivelockError&) {
    future.first = kNever;
  }
  future.events = told(engine);
  future.free_blocks = engine.scheduler().num_free_blocks();
  return future;
}

// An estimate restored into lockstep is one that visits every request, whatever ends the router expects.
void estimates_agree(const Engine& engine, Lcg& draw) {
  const Snapshot shot = Snapshot::capture(engine);
  SchedulerConfig config = engine.scheduler().config();
  config.enable_prefix_caching = config.enable_prefix_caching && !config.shared_prefixes && draw.once_in(2);
  config.track_blocks = false;
  std::vector<ExpectedEnd> ends;
  for (const RequestState& r : shot.requests) {
    ends.push_back({draw.once_in(3) ? r.num_output_tokens + 1 : 1 + draw.below(60), draw.once_in(2)});
  }
  Submission candidate = ask(1'000'000, engine.now(), 1 + draw.below(40), 1 + draw.below(10));
  candidate.priority = draw.below(3);
  const Future fast = future_of(shot, ends, config, candidate, true);
  const Future visiting = future_of(shot, ends, config, candidate, false);
  CHECK(fast.first == visiting.first);
  CHECK(fast.free_blocks == visiting.free_blocks);
  const auto by_time = [](const Event& a, const Event& b) {
    return std::tie(a.at, a.id, a.kind) < std::tie(b.at, b.id, b.kind);
  };
  std::vector<Event> first = fast.events, second = visiting.events;
  std::sort(first.begin(), first.end(), by_time);
  std::sort(second.begin(), second.end(), by_time);
  CHECK(std::equal(first.begin(), first.end(), second.begin(), second.end(), same));
}

// What a router does beside a running engine: look, estimate, and look again.
void look_and_estimate(Engine& engine, InstanceView& view, Lcg& draw) {
  view.refresh(std::make_shared<const Snapshot>(Snapshot::capture(engine)));
  const Dispatch candidate{1'000'000, 1 + draw.below(40), 1 + draw.below(10), -1, false, draw.below(3), 0,
                           engine.now()};
  const Picoseconds first = view.estimate_first_token(candidate);
  CHECK(first == view.estimate_first_token(candidate));
  CHECK(first > engine.now());
  CHECK(engine.next_event() >= 0);
}

void one_world(std::uint64_t seed) {
  Lcg draw{seed};
  const SchedulerConfig config = random_config(draw);
  CHECK(config.validate().empty());
  Engine fast(config, u_step());
  Engine stepping(config, u_step(), {}, EngineOptions{true, true, false});
  InstanceView view(config, u_step(), 5, true);
  const std::int64_t requests = 5 + draw.below(40);
  for (std::int64_t id = 0; id < requests; ++id) {
    const Submission s = random_request(draw, config, id, fast.now());
    CHECK(fast.submit(s) == stepping.submit(s));
    view.record_dispatch({id, s.prompt_tokens, s.output_tokens, s.max_tokens, s.ends_by_length, s.priority,
                          s.arrival_time, s.at});
    if (draw.once_in(6)) {
      const Picoseconds at = s.at + draw.below(80) * kMs;
      fast.cancel(id, at);
      stepping.cancel(id, at);
    }
    if (draw.once_in(3)) {
      const Picoseconds t = fast.now() + draw.below(50) * kMs + draw.below(2);
      fast.advance_to(t);
      stepping.advance_to(t);
      agree(fast, stepping);
    }
    if (draw.once_in(5)) look_and_estimate(fast, view, draw);
    if (draw.once_in(3)) estimates_agree(draw.once_in(2) ? fast : stepping, draw);
  }
  Engine copy = fast;
  fast.drain();
  copy.drain();
  stepping.drain();
  agree(fast, copy);
  agree(fast, stepping);
  const auto ends = ends_of(fast);
  CHECK(static_cast<std::int64_t>(ends.size()) == requests);
  for (const auto& [id, count] : ends) CHECK(id >= 0 && count == 1);
  CHECK(fast.scheduler().num_free_blocks() == config.num_usable_blocks());
  CHECK(!fast.scheduler().has_requests());
}

}  // namespace

// The number of worlds may be given.
int main(int argc, char** argv) {
  const long worlds = argc > 1 ? std::strtol(argv[1], nullptr, 10) : 300;
  for (long seed = 1; seed <= worlds && failures < 10; ++seed) {
    const int before = failures;
    one_world(static_cast<std::uint64_t>(seed));
    if (failures > before) std::printf("in the world of seed %ld\n", seed);
  }
  return report("stress");
}
