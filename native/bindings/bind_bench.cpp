// Tight loops around the public core, for `simcluster bench`: what a figure about the core measures has no Python call
// in it. Nothing here is part of a simulation.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "decide.hpp"
#include "snapshot.hpp"
#include "view.hpp"

namespace nb = nanobind;
using namespace simcluster;

namespace {

using Int64Array = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig>;

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#else
  return "unknown";
#endif
}

void check_range(const Int64Array& prompt_tokens, const Int64Array& output_tokens, const Int64Array& at,
                 std::int64_t first, std::int64_t count) {
  const auto size = static_cast<std::int64_t>(at.size());
  if (first < 0 || count < 0 || first + count > size || static_cast<std::int64_t>(prompt_tokens.size()) != size ||
      static_cast<std::int64_t>(output_tokens.size()) != size) {
    throw std::invalid_argument("the requests asked for are not all there");
  }
}

Submission submission(const Int64Array& prompt_tokens, const Int64Array& output_tokens, const Int64Array& at,
                      std::int64_t i) {
  Submission s;
  s.id = i;
  s.prompt_tokens = prompt_tokens.data()[i];
  s.output_tokens = output_tokens.data()[i];
  s.at = at.data()[i];
  return s;
}

std::int64_t round_robin(const std::vector<Engine*>& engines, const Int64Array& prompt_tokens,
                         const Int64Array& output_tokens, const Int64Array& at, std::int64_t first,
                         std::int64_t count) {
  check_range(prompt_tokens, output_tokens, at, first, count);
  if (engines.empty()) throw std::invalid_argument("there are no engines");
  const nb::gil_scoped_release release;
  constexpr std::size_t kAhead = 4;
  const bool many = engines.size() > kAhead;
  const auto ahead = [&](std::size_t turn, std::size_t by) -> const Engine& {
    return *engines[turn + by < engines.size() ? turn + by : turn + by - engines.size()];
  };
  const std::int64_t *const prompts = prompt_tokens.data(), *const outputs = output_tokens.data();
  const Picoseconds* const arrivals = at.data();
  std::int64_t seen = 0;
  Submission s;
  std::size_t turn = static_cast<std::size_t>(first) % engines.size();
  for (std::int64_t i = first; i < first + count; ++i) {
    if (many) {
      ahead(turn, kAhead).prefetch();
      ahead(turn, kAhead / 2).prefetch_contents();
    }
    Engine& engine = *engines[turn];
    if (++turn == engines.size()) turn = 0;
    s.id = i;
    s.prompt_tokens = prompts[i];
    s.output_tokens = outputs[i];
    s.at = arrivals[i];
    engine.advance_to(s.at);
    engine.submit(s);
    seen += static_cast<std::int64_t>(engine.events().size());
    engine.events().clear();
  }
  return seen;
}

std::int64_t estimate_repeatedly(InstanceView& view, const std::shared_ptr<Snapshot>& snapshot,
                                 std::int64_t prompt_tokens, std::int64_t output_tokens, Picoseconds at,
                                 std::int64_t repeats) {
  const nb::gil_scoped_release release;
  // In turn the state as it is and the same some batches later, so that a view which keeps what it has worked out for
  // a state shown again has nothing to keep.
  std::array<std::shared_ptr<const Snapshot>, 2> states{snapshot, nullptr};
  if (snapshot) {
    auto later = std::make_shared<Snapshot>(*snapshot);
    later->num_executed += 1;
    states[1] = std::move(later);
  }
  Dispatch candidate;
  candidate.id = std::int64_t{1} << 60;
  candidate.predicted_output = output_tokens;
  candidate.at = at;
  Picoseconds first_token = kNever;
  for (std::int64_t i = repeats - 1; i >= 0; --i) {
    if (snapshot) view.refresh(states[static_cast<std::size_t>(i % 2)]);
    candidate.prompt_tokens = prompt_tokens + i % 4;  // else the compiler might ask once; the last one is as given
    first_token = view.estimate_first_token(candidate);
  }
  return first_token;
}

// What a request to all kinds of instances is where they differ in utility alone.
std::vector<Offer> offers_for(const std::vector<double>& utility, std::int64_t turn, std::int64_t prompt_tokens,
                              std::int64_t output_tokens, Picoseconds at) {
  std::vector<Offer> offers;
  for (std::size_t k = 0; k < utility.size(); ++k) {
    const double value = utility[(k + static_cast<std::size_t>(turn)) % utility.size()];
    offers.push_back({value, prompt_tokens, output_tokens, at, 0});
  }
  return offers;
}

std::int64_t decide_repeatedly(Fleet& fleet, const std::vector<double>& utility, std::int64_t prompt_tokens,
                               std::int64_t output_tokens, Picoseconds at, double target_s, Explain explain,
                               std::int64_t repeats) {
  const nb::gil_scoped_release release;
  Query query;
  query.id = std::int64_t{1} << 60;
  query.arrival_time = at;
  query.target_s = target_s;
  query.explain = explain;
  std::vector<Offer> offers = offers_for(utility, 0, prompt_tokens, output_tokens, at);
  std::int64_t chosen = -1;
  for (std::int64_t i = repeats - 1; i >= 0; --i) {
    for (Offer& offer : offers) offer.prompt_tokens = prompt_tokens + i % 4;  // the last one is as given
    chosen = fleet.decide(query, offers).best.front();
  }
  return chosen;
}

std::vector<std::int32_t> route(const std::vector<Engine*>& engines, const std::vector<InstanceView*>& views,
                                Fleet& fleet, const std::vector<double>& utility, const Int64Array& prompt_tokens,
                                const Int64Array& output_tokens, const Int64Array& at, std::int64_t first,
                                std::int64_t count, double target_s, std::int64_t refresh_after) {
  check_range(prompt_tokens, output_tokens, at, first, count);
  if (engines.size() != fleet.size() || views.size() != fleet.size()) {
    throw std::invalid_argument("there must be one engine and one view for each view of the fleet");
  }
  const nb::gil_scoped_release release;
  std::vector<std::int32_t> chosen;
  chosen.reserve(static_cast<std::size_t>(count));
  Query query;
  query.target_s = target_s;
  for (std::int64_t i = first; i < first + count; ++i) {
    const Submission s = submission(prompt_tokens, output_tokens, at, i);
    query.id = i;
    query.arrival_time = s.at;
    const std::vector<Offer> offers = offers_for(utility, i, s.prompt_tokens, s.output_tokens, s.at);
    const std::int32_t best = fleet.decide(query, offers).best.front();
    chosen.push_back(best);
    Engine& engine = *engines[static_cast<std::size_t>(best)];
    InstanceView& view = *views[static_cast<std::size_t>(best)];
    engine.advance_to(s.at);
    if (view.num_dispatched_since() >= refresh_after) {
      view.refresh(std::make_shared<const Snapshot>(Snapshot::capture(engine)));
    }
    engine.submit(s);
    engine.events().clear();
    view.record_dispatch({s.id, s.prompt_tokens, s.output_tokens, -1, false, 0, s.at, s.at});
  }
  return chosen;
}

}  // namespace

void bind_bench(nb::module_& m) {
  m.def("compiler", &compiler, "The compiler that built this module.");
  m.def("bench_round_robin", &round_robin, nb::arg("engines"), nb::arg("prompt_tokens"), nb::arg("output_tokens"),
        nb::arg("at"), nb::arg("first"), nb::arg("count"),
        "Hand requests first to first + count - 1 to the engines in turn, each engine advanced to the arrival.\n\n"
        "prompt_tokens, output_tokens, at [ps]: (n,). Returns the number of events, which are dropped.");
  m.def("bench_estimates", &estimate_repeatedly, nb::arg("view"), nb::arg("snapshot").none(),
        nb::arg("prompt_tokens"), nb::arg("output_tokens"), nb::arg("at"), nb::arg("repeats"),
        "Estimate a request `repeats` times, each time from the snapshot anew unless it is None; the first token [ps].");
  m.def("bench_decisions", &decide_repeatedly, nb::arg("fleet"), nb::arg("utility"), nb::arg("prompt_tokens"),
        nb::arg("output_tokens"), nb::arg("at"), nb::arg("target_s"), nb::arg("explain"), nb::arg("repeats"),
        "Decide by eq. 3 about a request `repeats` times; the instance chosen. utility (kinds,).");
  m.def("bench_route", &route, nb::arg("engines"), nb::arg("views"), nb::arg("fleet"), nb::arg("utility"),
        nb::arg("prompt_tokens"), nb::arg("output_tokens"), nb::arg("at"), nb::arg("first"), nb::arg("count"),
        nb::arg("target_s"), nb::arg("refresh_after"),
        "Decide by eq. 3 about requests first to first + count - 1 and hand each to the engine chosen.\n\n"
        "utility (kinds,) goes round by one kind from request to request. prompt_tokens, output_tokens (what views\n"
        "expect, too), at [ps]: (n,). A view is refreshed at the dispatch that follows `refresh_after` others to it;\n"
        "0: at every one. Returns the instances chosen, (count,).");
}
