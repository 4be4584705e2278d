#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <compare>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "decide.hpp"

namespace nb = nanobind;
using namespace simcluster;

namespace {

template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig>;
template <typename T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig>;
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

using Decided =
    std::tuple<const char*, bool, NewColumn<std::int64_t>, NewColumn<double>, NewColumn<double>>;

Decided told(const Fleet& fleet, const Choice& choice, const std::vector<double>& score) {
  return {name_of(choice.because), choice.none_healthy, to_column<std::int64_t>(choice.best),
          to_column<double>(fleet.ttft_s()), to_column<double>(score)};
}

// Decides about requests that lie in columns, so that one costs as much as there are kinds of views.
class Desk {
 public:
  Desk(Fleet& fleet, const Column<std::int64_t>& group, const Column<std::int64_t>& delay,
       const Column<std::int64_t>& hop, Matrix<double> utility, Matrix<std::int64_t> prompt_tokens,
       Matrix<std::int64_t> predicted_output, Column<std::int64_t> max_tokens, Column<std::int64_t> priority,
       Column<double> target_s)
      : fleet_(fleet), utility_(std::move(utility)), prompt_tokens_(std::move(prompt_tokens)),
        predicted_output_(std::move(predicted_output)), max_tokens_(std::move(max_tokens)),
        priority_(std::move(priority)), target_s_(std::move(target_s)) {
    const std::size_t n = fleet.size(), rows = target_s_.size(), groups = utility_.shape(1);
    const auto fits = [&](const auto& matrix) { return matrix.shape(0) == rows && matrix.shape(1) == groups; };
    if (group.size() != n || delay.size() != n || hop.size() != n || !fits(utility_) || !fits(prompt_tokens_) ||
        !fits(predicted_output_) || max_tokens_.size() != rows || priority_.size() != rows) {
      throw std::invalid_argument("the columns of the views or of the requests differ in length");
    }
    for (std::size_t i = 0; i < n; ++i) {
      const std::int64_t g = group.data()[i];
      if (g < 0 || static_cast<std::size_t>(g) >= groups) throw std::invalid_argument("there is no such group");
      ways_.push_back({static_cast<std::size_t>(g), delay.data()[i], hop.data()[i]});
    }
    split_kinds();
  }

  Decided decide(std::int64_t row, Picoseconds arrival_time, Picoseconds sent, Objective objective,
                 double latency_weight, Explain explain, const std::vector<bool>& healthy) {
    const auto r = static_cast<std::size_t>(row);
    if (row < 0 || r >= target_s_.size()) throw std::invalid_argument("there is no such request");
    const std::vector<std::uint8_t> may(healthy.begin(), healthy.end());
    const Choice* choice = nullptr;
    std::vector<double> score;
    {
      nb::gil_scoped_release release;
      if (first_of_kind_.size() != fleet_.num_kinds()) split_kinds();
      std::vector<Offer> offers;
      for (const std::size_t i : first_of_kind_) {
        const std::size_t at = r * utility_.shape(1) + ways_[i].group;
        offers.push_back({utility_.data()[at], prompt_tokens_.data()[at], predicted_output_.data()[at],
                          sent + ways_[i].delay, ways_[i].hop});
      }
      choice = &fleet_.decide({row, max_tokens_.data()[r], false, priority_.data()[r], arrival_time, objective,
                               target_s_.data()[r], latency_weight, explain},
                              offers, may);
      score = fleet_.score();
    }
    return told(fleet_, *choice, score);
  }

 private:
  struct Way {  // to a view, and whose values a request has there
    std::size_t group;
    Picoseconds delay, hop;

    auto operator<=>(const Way&) const = default;
  };

  // So that a request is the same to all views of one kind.
  void split_kinds() {
    std::map<std::pair<std::int32_t, Way>, std::int32_t> numbers;
    std::vector<std::int32_t> kinds;
    first_of_kind_.clear();
    for (std::size_t i = 0; i < ways_.size(); ++i) {
      const auto next = static_cast<std::int32_t>(numbers.size());
      const auto [it, is_new] = numbers.try_emplace({fleet_.kind_of_view()[i], ways_[i]}, next);
      if (is_new) first_of_kind_.push_back(i);
      kinds.push_back(it->second);
    }
    if (kinds != fleet_.kind_of_view()) fleet_.regroup(std::move(kinds));
  }

  Fleet& fleet_;
  Matrix<double> utility_;
  Matrix<std::int64_t> prompt_tokens_, predicted_output_;
  Column<std::int64_t> max_tokens_, priority_;
  Column<double> target_s_;
  std::vector<Way> ways_;                  // (n,)
  std::vector<std::size_t> first_of_kind_;
};

constexpr const char* kDecided =
    "Returns (feasible, infeasible or score; whether none is healthy; the equally good views, ascending; TTFT "
    "(n,) [s], inf where it cannot be served, nan where not estimated; score (n,), -inf where not a choice).\n\n"
    "Raises ValueError for a utility that is not a number or a negative weight. Source: paper eqs. 3, 5, 7, 8.";

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
             const std::vector<bool>& healthy, Picoseconds sent) {
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
                offers[i] = {utility.data()[i], prompt_tokens.data()[i], predicted_output.data()[i], sent + at.data()[i],
                             hop.data()[i]};
              }
              choice = fleet.decide({id, max_tokens, ends_by_length, priority, arrival_time, objective, target_s,
                                     latency_weight, explain},
                                    offers_by_kind(fleet, offers), may);
              score = fleet.score();
            }
            return told(fleet, choice, score);
          },
          nb::arg("id"), nb::arg("utility"), nb::arg("prompt_tokens"), nb::arg("predicted_output"), nb::arg("at"),
          nb::arg("hop"), nb::kw_only(), nb::arg("max_tokens") = -1, nb::arg("ends_by_length") = false,
          nb::arg("priority") = 0, nb::arg("arrival_time") = 0, nb::arg("objective") = Objective::slo,
          nb::arg("target_s") = std::numeric_limits<double>::infinity(), nb::arg("latency_weight") = 0.0,
          nb::arg("explain") = Explain::runner_up, nb::arg("healthy") = std::vector<bool>{},
          nb::arg("sent") = 0,
          (std::string("Decide about one request, which reaches the engines at `sent` + `at`; all columns (n,), times "
                       "[ps].\n\n") +
           kDecided)
              .c_str())
      .def_prop_ro("num_kinds", &Fleet::num_kinds)
      .def_prop_ro("num_estimated", [](const Fleet& f) { return f.estimated().size(); },
                   "Views estimated in the last decision.");
  nb::class_<Desk>(m, "Desk", "Decides about the requests of a run, which lie in columns.")
      .def(nb::init<Fleet&, const Column<std::int64_t>&, const Column<std::int64_t>&, const Column<std::int64_t>&,
                    Matrix<double>, Matrix<std::int64_t>, Matrix<std::int64_t>, Column<std::int64_t>,
                    Column<std::int64_t>, Column<double>>(),
           nb::keep_alive<1, 2>(), nb::arg("fleet"), nb::arg("group_of_view"), nb::arg("delay"), nb::arg("hop"),
           nb::arg("utility"), nb::arg("prompt_tokens"), nb::arg("predicted_output"), nb::arg("max_tokens"),
           nb::arg("priority"), nb::arg("target_s"),
           "n views, k requests, whose values are equal within a group of views: group_of_view, and delay and hop to\n"
           "and from the engines [ps] (n,); utility, prompt_tokens, predicted_output (k, groups); max_tokens,\n"
           "priority, target_s (k,). Raises ValueError for columns that do not fit each other.")
      .def("decide", &Desk::decide, nb::arg("row"), nb::arg("arrival_time"), nb::arg("sent"), nb::kw_only(),
           nb::arg("objective") = Objective::slo, nb::arg("latency_weight") = 0.0,
           nb::arg("explain") = Explain::runner_up, nb::arg("healthy") = std::vector<bool>{},
           (std::string("Decide about the request in a row, which leaves the router at `sent`; times [ps].\n\n") +
            kDecided).c_str());
}
