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

std::int64_t round_robin(const std::vector<Engine*>& engines, const Int64Array& prompt_tokens,
                         const Int64Array& output_tokens, const Int64Array& at, std::int64_t first,
                         std::int64_t count) {
  const auto size = static_cast<std::int64_t>(at.size());
  if (engines.empty() || first < 0 || count < 0 || first + count > size ||
      static_cast<std::int64_t>(prompt_tokens.size()) != size ||
      static_cast<std::int64_t>(output_tokens.size()) != size) {
    throw std::invalid_argument("the requests asked for are not all there");
  }
  const nb::gil_scoped_release release;
  std::int64_t seen = 0;
  Submission s;
  for (std::int64_t i = first; i < first + count; ++i) {
    Engine& engine = *engines[static_cast<std::size_t>(i) % engines.size()];
    s.id = i;
    s.prompt_tokens = prompt_tokens.data()[i];
    s.output_tokens = output_tokens.data()[i];
    s.at = at.data()[i];
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
}
