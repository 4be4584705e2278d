// Decisions over random fleets: those that skip views choose as those that estimate all, and as brute force.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "decide.hpp"
#include "helpers.hpp"

using namespace simcluster;
using namespace simcluster::testing;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Lcg {
  std::uint64_t state;
  std::int64_t below(std::int64_t n) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<std::int64_t>((state >> 33) % static_cast<std::uint64_t>(n));
  }
  bool once_in(std::int64_t n) { return below(n) == 0; }
};

// The winners by whole simulations of every view, written down as the objectives are.
std::vector<std::int32_t> by_brute_force(const std::vector<std::shared_ptr<InstanceView>>& views,
                                         const std::vector<std::int32_t>& kinds, const Query& q,
                                         const std::vector<Offer>& offers, std::vector<std::uint8_t> healthy) {
  if (std::all_of(healthy.begin(), healthy.end(), [](auto ok) { return ok == 0; })) healthy.assign(views.size(), 1);
  std::vector<double> ttft(views.size()), value(views.size(), -kInf);
  bool any = false;
  for (const bool feasible : {true, false}) {
    for (std::size_t i = 0; i < views.size(); ++i) {
      const Offer& o = offers[static_cast<std::size_t>(kinds[i])];
      const Picoseconds first = views[i]->simulate_first_token(
          {q.id, o.prompt_tokens, o.predicted_output, q.max_tokens, q.ends_by_length, q.priority, q.arrival_time, o.at});
      ttft[i] = first == kNever ? kInf : static_cast<double>(first + o.hop - q.arrival_time) / 1e12;
      const bool served = std::isfinite(ttft[i]) && (q.objective == Objective::weighted || ttft[i] <= q.target_s);
      if (healthy[i] == 0 || (feasible && !served)) continue;
      any = true;
      value[i] = q.objective == Objective::weighted ? o.utility - q.latency_weight * ttft[i] : o.utility;
      if (!feasible) value[i] = -ttft[i];
    }
    if (any) break;
  }
  std::vector<std::int32_t> best;
  double most = -kInf, least = kInf;
  for (std::size_t i = 0; i < views.size(); ++i) {
    if (healthy[i] != 0) most = std::max(most, value[i]);
  }
  for (std::size_t i = 0; i < views.size(); ++i) {
    if (healthy[i] != 0 && value[i] == most) least = std::min(least, ttft[i]);
  }
  for (std::size_t i = 0; i < views.size(); ++i) {
    if (healthy[i] != 0 && value[i] == most && ttft[i] == least) best.push_back(static_cast<std::int32_t>(i));
  }
  return best;
}

void play(std::uint64_t seed) {
  Lcg draw{seed};
  const std::int64_t n = 1 + draw.below(20), num_kinds = std::min<std::int64_t>(n, 1 + draw.below(3));
  std::vector<std::shared_ptr<InstanceView>> views;
  std::vector<std::int32_t> kinds;
  for (std::int64_t i = 0; i < n; ++i) {
    SchedulerConfig config = plain(draw.once_in(2), 8 + draw.below(60), 16);
    config.max_num_batched_tokens = 16 << draw.below(3);
    config.max_num_seqs = 2 + draw.below(8);
    StepTimeModel model = u_step();
    model.b3 = draw.below(2) * 1000;
    model.b1x = draw.below(2) * kMs;
    model.hinge_tokens = 20;
    views.push_back(std::make_shared<InstanceView>(config, model, 10, true));
    kinds.push_back(static_cast<std::int32_t>(i % num_kinds));
  }
  Fleet fleet(views, kinds);
  Picoseconds now = 0;
  for (std::int64_t id = 0; id < 40; ++id) {
    now += draw.below(3) * 10 * kMs;
    Query q;
    q.id = id;
    q.arrival_time = now;
    q.objective = draw.once_in(2) ? Objective::slo : Objective::weighted;
    q.latency_weight = static_cast<double>(draw.below(3));
    q.target_s = draw.once_in(3) ? kInf : 0.05 * static_cast<double>(draw.below(6));
    std::vector<Offer> offers;
    for (std::int64_t k = 0; k < num_kinds; ++k) {
      offers.push_back({0.25 * static_cast<double>(draw.below(3)), 1 + draw.below(draw.once_in(4) ? 300 : 40),
                        1 + draw.below(20), now + draw.below(2) * kMs, 0});
    }
    std::vector<std::uint8_t> healthy(static_cast<std::size_t>(n), 1);
    if (draw.once_in(3)) {
      for (auto& ok : healthy) ok = draw.once_in(2) ? 1 : 0;
    }
    const std::vector<std::int32_t> true_best = by_brute_force(views, kinds, q, offers, healthy);
    for (const Explain explain : {Explain::choice, Explain::runner_up, Explain::all}) {
      q.explain = explain;
      CHECK(fleet.decide(q, offers, healthy).best == true_best);
    }
    const auto j = static_cast<std::size_t>(true_best.front());
    const Offer& o = offers[static_cast<std::size_t>(kinds[j])];
    views[j]->record_dispatch({id, o.prompt_tokens, o.predicted_output, -1, false, 0, now, o.at});
  }
}

}  // namespace

int main() {
  const char* given = std::getenv("SIMCLUSTER_WORKLOADS");
  const std::int64_t fleets = given != nullptr ? std::atoll(given) : 150;
  for (std::int64_t seed = 1; seed <= fleets && failures == 0; ++seed) play(static_cast<std::uint64_t>(seed) * 104729);

  const auto view = std::make_shared<InstanceView>(plain(true), u_step(), 10, true);
  Fleet fleet({view}, {0});
  const std::vector<Offer> offers{{std::nan(""), 1, 1, 0, 0}};
  CHECK(throws<std::invalid_argument>([&] { fleet.decide({}, offers); }));
  CHECK(throws<std::invalid_argument>([&] { fleet.decide({}, std::vector<Offer>(2)); }));
  CHECK(throws<std::invalid_argument>([&] { fleet.regroup({1}); }));
  return report("decide");
}
