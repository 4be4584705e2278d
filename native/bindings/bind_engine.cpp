#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "engine.hpp"
#include "snapshot.hpp"

namespace nb = nanobind;
using namespace simcluster;

namespace {

Int64Table take_events(Engine& engine) {
  std::vector<std::int64_t> rows;
  rows.reserve(engine.events().size() * 5);
  for (const Event& e : engine.events()) {
    rows.insert(rows.end(), {e.id, e.at, e.value, static_cast<std::int64_t>(e.kind),
                             static_cast<std::int64_t>(e.reason)});
  }
  engine.events().clear();
  return to_table(std::move(rows), 5);
}

Int64Table take_steps(Engine& engine) {
  std::vector<std::int64_t> rows;
  rows.reserve(engine.steps().size() * 11);
  for (const StepRecord& s : engine.steps()) {
    rows.insert(rows.end(),
                {s.index, s.start, s.end, s.features.num_tokens, s.features.num_decodes,
                 s.features.sum_decode_context, s.features.prefill_attention, s.features.num_prefills,
                 s.num_running, s.num_waiting, s.num_free_blocks});
  }
  engine.steps().clear();
  return to_table(std::move(rows), 11);
}

void bind_step_time(nb::module_& m) {
  nb::class_<StepTimeModel>(m, "StepTimeModel", "Coefficients of the step time in whole picoseconds.")
      .def(nb::init<>())
      .def_rw("b0", &StepTimeModel::b0)
      .def_rw("b1", &StepTimeModel::b1)
      .def_rw("b1x", &StepTimeModel::b1x)
      .def_rw("b2", &StepTimeModel::b2)
      .def_rw("b3", &StepTimeModel::b3)
      .def_rw("b4", &StepTimeModel::b4)
      .def_rw("b5", &StepTimeModel::b5)
      .def_rw("hinge_tokens", &StepTimeModel::hinge_tokens)
      .def_rw("host", &StepTimeModel::host)
      .def(
          "device_time",
          [](const StepTimeModel& model, const std::vector<std::pair<std::int64_t, std::int64_t>>& prefills,
             const std::vector<std::int64_t>& decodes) {
            StepFeatures f;
            for (const auto& [tokens, context] : prefills) f.add(context, tokens, false);
            for (const std::int64_t context : decodes) f.add(context, 1, true);
            return model.device_time(f);
          },
          nb::arg("prefills"), nb::arg("decodes"),
          "Time [ps] of a batch of prefills (tokens, context before) and decodes (context before).")
      .def("period", &StepTimeModel::period, nb::arg("device"), nb::arg("asynchronous"),
           "One turn of the loop [ps] for a batch that takes the accelerator `device` [ps].");
  nb::class_<StepNoise>(m, "StepNoise", "Multiplicative noise per step, a pure hash of seed, instance and step.")
      .def(
          "__init__",
          [](StepNoise* self, nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig> factors,
             std::uint64_t seed, std::uint64_t instance) {
            auto table = std::make_shared<const std::vector<std::int64_t>>(factors.data(),
                                                                           factors.data() + factors.size());
            new (self) StepNoise{std::move(table), seed, instance};
          },
          nb::arg("factors"), nb::arg("seed"), nb::arg("instance"), "factors: (n,) int64, in units of 2**-32.")
      .def_static(
          "recorded",
          [](nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig> durations) {
            auto table = std::make_shared<const std::vector<std::int64_t>>(durations.data(),
                                                                           durations.data() + durations.size());
            return StepNoise{std::move(table), 0, 0, true};
          },
          nb::arg("durations"),
          "Steps that take what was recorded, (n,) int64 [ps] by number of the step; later ones take the model's time.")
      .def("apply", &StepNoise::apply, nb::arg("device"), nb::arg("step"),
           "The time [ps] that a step of `device` [ps] really takes.");
}

}  // namespace

void bind_engine(nb::module_& m) {
  m.attr("NEVER") = kNever;
  nb::exception<LivelockError>(m, "LivelockError");
  bind_step_time(m);
  nb::enum_<EventKind>(m, "EventKind", nb::is_arithmetic())
      .value("scheduled", EventKind::scheduled)
      .value("first_token", EventKind::first_token)
      .value("token", EventKind::token)
      .value("preempted", EventKind::preempted)
      .value("finished", EventKind::finished)
      .value("rejected", EventKind::rejected)
      .value("failed", EventKind::failed);
  nb::class_<Engine>(m, "Engine", "One serving instance on the simulated clock.")
      .def(
          "__init__",
          [](Engine* self, const SchedulerConfig& config, const StepTimeModel& step_time,
             const StepNoise* noise, bool record_tokens, bool record_steps, bool fast) {
            new (self) Engine(config, step_time, noise != nullptr ? *noise : StepNoise{},
                              EngineOptions{record_tokens, record_steps, fast});
          },
          nb::arg("config"), nb::arg("step_time"), nb::arg("noise").none() = nb::none(),
          nb::arg("record_tokens") = false, nb::arg("record_steps") = false, nb::arg("fast") = true)
      .def(
          "submit",
          [](Engine& engine, std::int64_t id, std::int64_t prompt_tokens, std::int64_t output_tokens,
             Picoseconds at, std::int64_t max_tokens, bool ends_by_length, std::int64_t priority,
             Picoseconds arrival_time, const std::vector<std::pair<std::uint64_t, std::int64_t>>& prompt) {
            Submission s;
            s.id = id;
            s.prompt_tokens = prompt_tokens;
            s.output_tokens = output_tokens;
            s.at = at;
            s.max_tokens = max_tokens;
            s.ends_by_length = ends_by_length;
            s.priority = priority;
            s.arrival_time = arrival_time;
            for (const auto& [first, count] : prompt) s.prompt.push_back({first, count});
            return engine.submit(s);
          },
          nb::arg("id"), nb::arg("prompt_tokens"), nb::arg("output_tokens"), nb::arg("at"),
          nb::arg("max_tokens") = -1, nb::arg("ends_by_length") = false, nb::arg("priority") = 0,
          nb::arg("arrival_time") = 0,
          nb::arg("prompt") = std::vector<std::pair<std::uint64_t, std::int64_t>>{},
          "Hand over a request that reaches the engine at `at` [ps]; False if it is rejected.")
      .def("cancel", &Engine::cancel, nb::arg("id"), nb::arg("at"))
      .def("advance_to", &Engine::advance_to, nb::arg("t"), nb::call_guard<nb::gil_scoped_release>(),
           "Process every step that ends at or before t [ps].")
      .def("drain", &Engine::drain, nb::call_guard<nb::gil_scoped_release>(), "Run until nothing is left to do.")
      .def("run_to_first_token", &Engine::run_to_first_token, nb::arg("id"), nb::call_guard<nb::gil_scoped_release>(),
           "Run until this request's first output token and return when it comes [ps]; NEVER if it never does.")
      .def("next_event", [](const Engine& engine) { return engine.next_event(); },
           nb::call_guard<nb::gil_scoped_release>(),
           "Earliest event [ps] if nothing else arrives; NEVER if none.")
      .def_prop_ro("next_change", &Engine::next_change,
                   "Advancing to an earlier instant [ps] changes nothing; NEVER while nothing is to come.")
      .def("next_end", &Engine::next_end, nb::call_guard<nb::gil_scoped_release>(),
           "When to advance to [ps] to be told of the next end of a request if nothing else arrives; NEVER if none.")
      .def("fork", [](const Engine& engine) { return Engine(engine); }, "An independent copy.")
      .def("snapshot", [](const Engine& e) { return std::make_shared<Snapshot>(Snapshot::capture(e)); },
           "The state at the newest step boundary.")
      .def("take_events", &take_events, "Rows (id, at [ps], value, kind, reason) since the last call, (n, 5).")
      .def("take_steps", &take_steps,
           "Rows (index, start, end [ps], tokens, decodes, decode context, prefill attention, prefills, running, "
           "waiting, free blocks) since the last call, (n, 11).")
      .def_prop_ro("now", &Engine::now)
      .def_prop_ro("num_steps", &Engine::num_steps)
      .def_prop_ro("busy_time", &Engine::busy_time)
      .def_prop_ro("num_pending", &Engine::num_pending, "Requests handed over but not yet taken by the loop.")
      .def_prop_ro("num_running", [](const Engine& e) { return e.scheduler().num_running(); })
      .def_prop_ro("num_waiting", [](const Engine& e) { return e.scheduler().waiting().size(); })
      .def_prop_ro("num_free_blocks", [](const Engine& e) { return e.scheduler().num_free_blocks(); })
      .def_prop_ro("num_preemptions", [](const Engine& e) { return e.scheduler().num_preemptions(); })
      .def_prop_ro("running_ids",
                   [](const Engine& e) {
                     std::vector<std::int64_t> ids;
                     for (auto slot : e.scheduler().running()) ids.push_back(e.scheduler().request(slot).id);
                     return ids;
                   })
      .def_prop_ro("waiting_ids",
                   [](const Engine& e) {
                     std::vector<std::int64_t> ids;
                     for (auto slot : e.scheduler().waiting()) ids.push_back(e.scheduler().request(slot).id);
                     return ids;
                   })
      .def_prop_ro(
          "prefix_stats",
          [](const Engine& e) {
            const PrefixStats& s = e.scheduler().prefix_stats();
            return std::vector<std::int64_t>{s.queries, s.hits, s.preempted_queries, s.preempted_hits};
          },
          "[queries, hits, preempted queries, preempted hits] in tokens.");
}
