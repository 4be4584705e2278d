#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "bindings.hpp"
#include "decide.hpp"

namespace nb = nanobind;
using namespace simcluster;

namespace {

template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig>;
template <typename T>
using NewColumn = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <typename T, typename From>
NewColumn<T> to_column(const std::vector<From>& values) {
  auto* data = new std::vector<T>(values.begin(), values.end());
  nb::capsule owner(data, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return NewColumn<T>(data->data(), {data->size()}, owner);
}

const char* name_of(Because because) {
  switch (because) {
    case Because::feasible:
      return "feasible";
    case Because::infeasible:
      return "infeasible";
    default:
      return "score";
  }
}

// Offers by kind; views of one kind whose offers differ become kinds of their own.
std::vector<Offer> offers_by_kind(Fleet& fleet, const std::vector<Offer>& offers) {
  std::vector<Offer> by_kind(fleet.num_kinds());
  std::vector<std::uint8_t> given(fleet.num_kinds(), 0);
  for (std::size_t i = 0; i < offers.size(); ++i) {
    const auto k = static_cast<std::size_t>(fleet.kind_of_view()[i]);
    if (given[k] != 0 && by_kind[k] != offers[i]) {
      std::vector<std::int32_t> apart(fleet.size());
      std::iota(apart.begin(), apart.end(), 0);
      fleet.regroup(std::move(apart));
      return offers;
    }
    given[k] = 1;
    by_kind[k] = offers[i];
  }
  return by_kind;
}

}  // namespace

void bind_decide(nb::module_& m) {
  nb::enum_<Objective>(m, "Objective").value("slo", Objective::slo).value("weighted", Objective::weighted);
  nb::enum_<Explain>(m, "Explain", "Who is estimated beside the winners.")
      .value("choice", Explain::choice)
      .value("runner_up", Explain::runner_up)
      .value("all", Explain::all);
  nb::class_<Fleet>(m, "Fleet", "All views of one router, ready for decisions.")
      .def(nb::init<std::vector<std::shared_ptr<InstanceView>>, std::vector<std::int32_t>>(), nb::arg("views"),
           nb::arg("kind_of_view"),
           "kind_of_view (n,): numbers from 0; requests are usually the same to all views of one kind.")
      .def(
          "decide",
          [](Fleet& fleet, std::int64_t id, Column<double> utility, Column<std::int64_t> prompt_tokens,
             Column<std::int64_t> predicted_output, Column<std::int64_t> at, Column<std::int64_t> hop,
             std::int64_t max_tokens, bool ends_by_length, std::int64_t priority, Picoseconds arrival_time,
             Objective objective, double target_s, double latency_weight, Explain explain,
             const std::vector<bool>& healthy) {
            const std::size_t n = fleet.size();
            if (utility.size() != n || prompt_tokens.size() != n || predicted_output.size() != n || at.size() != n ||
                hop.size() != n) {
              throw std::invalid_argument("a decision needs one value of each kind per view");
            }
            const std::vector<std::uint8_t> may(healthy.begin(), healthy.end());
            Choice choice;
            std::vector<double> score;
            {
              nb::gil_scoped_release release;
              std::vector<Offer> offers(n);
              for (std::size_t i = 0; i < n; ++i) {
                offers[i] = {utility.data()[i], prompt_tokens.data()[i], predicted_output.data()[i], at.data()[i],
                             hop.data()[i]};
              }
              choice = fleet.decide({id, max_tokens, ends_by_length, priority, arrival_time, objective, target_s,
                                     latency_weight, explain},
                                    offers_by_kind(fleet, offers), may);
              score = fleet.score();
            }
            return std::tuple(name_of(choice.because), choice.none_healthy, to_column<std::int64_t>(choice.best),
                              to_column<double>(fleet.ttft_s()), to_column<double>(score));
          },
          nb::arg("id"), nb::arg("utility"), nb::arg("prompt_tokens"), nb::arg("predicted_output"), nb::arg("at"),
          nb::arg("hop"), nb::kw_only(), nb::arg("max_tokens") = -1, nb::arg("ends_by_length") = false,
          nb::arg("priority") = 0, nb::arg("arrival_time") = 0, nb::arg("objective") = Objective::slo,
          nb::arg("target_s") = std::numeric_limits<double>::infinity(), nb::arg("latency_weight") = 0.0,
          nb::arg("explain") = Explain::runner_up, nb::arg("healthy") = std::vector<bool>{},
          "Decide about one request, all columns (n,), times [ps].\n\n"
          "Returns (feasible, infeasible or score; whether none is healthy; the equally good views, ascending; TTFT "
          "(n,) [s], inf where it cannot be served, nan where not estimated; score (n,), -inf where not a choice).\n\n"
          "Raises ValueError for a utility that is not a number or a negative weight. Source: paper eqs. 3, 5, 7, 8.")
      .def_prop_ro("num_kinds", &Fleet::num_kinds)
      .def_prop_ro("num_estimated", [](const Fleet& f) { return f.estimated().size(); },
                   "Views estimated in the last decision.");
}
