#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <tuple>

#include "bindings.hpp"
#include "sfs_plus.hpp"

namespace nb = nanobind;
using namespace simcluster;

namespace {

template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig>;
using Values = nb::ndarray<nb::numpy, double, nb::ndim<1>>;

Values to_values(const std::vector<double>& values) {
  auto* data = new std::vector<double>(values);
  nb::capsule owner(data, [](void* p) noexcept { delete static_cast<std::vector<double>*>(p); });
  return Values(data->data(), {data->size()}, owner);
}

}  // namespace

void bind_sfs_plus(nb::module_& m) {
  nb::class_<SfsPlus>(m, "SfsPlus", "The decisions of one router whose delays have a price.")
      .def(
          "__init__",
          [](SfsPlus* self, std::vector<std::shared_ptr<InstanceView>> views, std::vector<std::int32_t> kind_of_view,
             double price, double slack_price, double horizon_s, std::int64_t routers) {
            PriceOptions options;
            options.price = price;
            options.slack_price = slack_price;
            options.horizon_s = horizon_s;
            options.routers = static_cast<double>(routers);
            new (self) SfsPlus(options, std::move(views), std::move(kind_of_view));
          },
          nb::arg("views"), nb::arg("kind_of_view"), nb::kw_only(), nb::arg("price"), nb::arg("slack_price"),
          nb::arg("horizon_s"), nb::arg("routers") = 1, "kind_of_view (n,): numbers from 0.")
      .def(
          "decide",
          [](SfsPlus& plus, std::int64_t id, Column<double> utility, Column<std::int64_t> prompt_tokens,
             Column<std::int64_t> predicted_output, Column<std::int64_t> at, Column<std::int64_t> hop,
             Picoseconds now, double target_s, std::int64_t max_tokens, std::int64_t priority,
             Picoseconds arrival_time, const std::vector<bool>& healthy) {
            const std::size_t n = plus.size();
            if (utility.size() != n || prompt_tokens.size() != n || predicted_output.size() != n || at.size() != n ||
                hop.size() != n || (!healthy.empty() && healthy.size() != n)) {
              throw std::invalid_argument("a decision needs one value of each kind per view");
            }
            const std::vector<std::uint8_t> may(healthy.begin(), healthy.end());
            const auto span = [n](const auto& column) { return std::span(column.data(), n); };
            std::vector<std::int32_t> best;
            {
              nb::gil_scoped_release release;
              best = plus.decide({id, max_tokens, priority, arrival_time, now, target_s},
                                 {span(utility), span(prompt_tokens), span(predicted_output), span(at), span(hop), may});
            }
            return std::tuple(std::move(best), to_values(plus.ttft_s()), to_values(plus.score()),
                              to_values(plus.chance()));
          },
          nb::arg("id"), nb::arg("utility"), nb::arg("prompt_tokens"), nb::arg("predicted_output"), nb::arg("at"),
          nb::arg("hop"), nb::kw_only(), nb::arg("now"), nb::arg("target_s"), nb::arg("max_tokens") = -1,
          nb::arg("priority") = 0, nb::arg("arrival_time") = 0, nb::arg("healthy") = std::vector<bool>{},
          "Decide about one request, all columns (n,), times [ps].\n\n"
          "Returns (views of the largest score, ascending; TTFT (n,) [s], inf where it cannot be served; score (n,), "
          "-inf where not a choice; chance to be on time (n,)).")
      .def("sent", &SfsPlus::sent, nb::arg("id"), nb::arg("instance"), "The request of the last decision was sent.")
      .def("first_token", &SfsPlus::first_token, nb::arg("id"), nb::arg("instance"), nb::arg("ttft_s"))
      .def("forget", &SfsPlus::forget, nb::arg("id"));
}
