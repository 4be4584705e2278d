#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>

#include "bindings.hpp"
#include "view.hpp"

namespace nb = nanobind;
using namespace simcluster;

namespace {

using Int64Array = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig>;

std::vector<std::int64_t> resident_ids(const Snapshot& s) {
  std::vector<std::int64_t> ids;
  for (const RequestState& r : s.requests) ids.push_back(r.id);
  return ids;
}

void bind_snapshot(nb::module_& m) {
  nb::class_<Snapshot>(m, "Snapshot", "What an instance publishes about itself.")
      .def_static("capture", [](const Engine& e) { return std::make_shared<Snapshot>(Snapshot::capture(e)); },
                  nb::arg("engine"))
      .def(
          "restore",
          [](const Snapshot& s, const SchedulerConfig& config, const StepTimeModel& step_time,
             const std::vector<std::pair<std::int64_t, bool>>& ends) {
            std::vector<ExpectedEnd> expected;
            for (const auto& [tokens, by_length] : ends) expected.push_back({tokens, by_length});
            Engine engine(config, step_time, {}, EngineOptions{true, true});
            s.restore(engine, expected);
            return engine;
          },
          nb::arg("config"), nb::arg("step_time"), nb::arg("ends"),
          "Continue on a new engine; ends: (expected output tokens, ends by length) of each resident request.")
      .def_prop_ro("taken_at", [](const Snapshot& s) { return s.taken_at; })
      .def_prop_ro("boundary", [](const Snapshot& s) { return s.boundary; })
      .def_prop_ro("intake", [](const Snapshot& s) { return s.intake; })
      .def_prop_ro("num_running", [](const Snapshot& s) { return s.num_running; })
      .def_prop_ro("num_waiting",
                   [](const Snapshot& s) { return static_cast<std::int64_t>(s.requests.size()) - s.num_running; })
      .def_prop_ro("num_free_blocks", [](const Snapshot& s) { return s.num_free_blocks; })
      .def_prop_ro("request_ids", &resident_ids, "Running in order, then waiting in order.")
      .def_prop_ro(
          "requests",
          [](const Snapshot& s) {
            std::vector<std::int64_t> rows;
            for (const RequestState& r : s.requests) {
              rows.insert(rows.end(), {r.id, r.num_prompt_tokens, r.num_output_tokens, r.num_computed_tokens,
                                       r.num_output_placeholders, r.num_blocks, r.visible_max_tokens,
                                       static_cast<std::int64_t>(r.status)});
            }
            return to_table(std::move(rows), 8);
          },
          "Rows (id, prompt, output, computed, placeholders, blocks, max_tokens, status), (n, 8).");
}

}  // namespace

void bind_view(nb::module_& m) {
  bind_snapshot(m);
  nb::class_<InstanceView>(m, "InstanceView", "One router's knowledge of one instance, with the SFS estimate.")
      .def(nb::init<SchedulerConfig, const StepTimeModel&, std::int64_t, bool>(), nb::arg("config"),
           nb::arg("believed"), nb::arg("mean_output"), nb::arg("overlay"))
      .def("refresh",
           [](InstanceView& v, std::shared_ptr<Snapshot> snapshot) { v.refresh(std::move(snapshot)); },
           nb::arg("snapshot"))
      .def(
          "record_dispatch",
          [](InstanceView& v, std::int64_t id, std::int64_t prompt_tokens, std::int64_t predicted_output,
             Picoseconds at, std::int64_t max_tokens, bool ends_by_length, std::int64_t priority,
             Picoseconds arrival_time) {
            v.record_dispatch({id, prompt_tokens, predicted_output, max_tokens, ends_by_length, priority,
                               arrival_time, at});
          },
          nb::arg("id"), nb::arg("prompt_tokens"), nb::arg("predicted_output"), nb::arg("at"),
          nb::arg("max_tokens") = -1, nb::arg("ends_by_length") = false, nb::arg("priority") = 0,
          nb::arg("arrival_time") = 0)
      .def_prop_ro("num_running", &InstanceView::num_running)
      .def_prop_ro("num_waiting", &InstanceView::num_waiting)
      .def_prop_ro("num_resident", &InstanceView::num_resident)
      .def_prop_ro("num_dispatched_since", &InstanceView::num_dispatched_since)
      .def_prop_ro("boundary", [](const InstanceView& v) { return v.snapshot().boundary; })
      .def_prop_ro("num_free_blocks", [](const InstanceView& v) { return v.snapshot().num_free_blocks; });

  m.def(
      "estimate_first_token",
      [](const std::vector<InstanceView*>& views, std::int64_t id, Int64Array prompt_tokens,
         Int64Array predicted_output, Int64Array at, std::int64_t max_tokens, bool ends_by_length,
         std::int64_t priority, Picoseconds arrival_time) {
        const std::size_t n = views.size();
        if (prompt_tokens.size() != n || predicted_output.size() != n || at.size() != n) {
          throw std::invalid_argument("one prompt length, predicted length and time per view are needed");
        }
        std::vector<std::int64_t> first(n);
        {
          nb::gil_scoped_release release;
          for (std::size_t j = 0; j < n; ++j) {
            first[j] = views[j]->estimate_first_token({id, prompt_tokens.data()[j], predicted_output.data()[j],
                                                       max_tokens, ends_by_length, priority, arrival_time,
                                                       at.data()[j]});
          }
        }
        auto* data = new std::vector<std::int64_t>(std::move(first));
        nb::capsule owner(data, [](void* p) noexcept { delete static_cast<std::vector<std::int64_t>*>(p); });
        return nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>(data->data(), {n}, owner);
      },
      nb::arg("views"), nb::arg("id"), nb::arg("prompt_tokens"), nb::arg("predicted_output"), nb::arg("at"),
      nb::arg("max_tokens") = -1, nb::arg("ends_by_length") = false, nb::arg("priority") = 0,
      nb::arg("arrival_time") = 0,
      "SFS: when the request's first token would be processed [ps], per view, (n,); NEVER if it cannot be served.\n\n"
      "Source: paper eqs. 7, 8.");
}
