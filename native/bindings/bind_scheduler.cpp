#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "bindings.hpp"
#include "scheduler.hpp"

namespace nb = nanobind;
using namespace simcluster;

namespace {

using Ids = std::vector<std::int64_t>;

Ids ids_of(const std::vector<Outcome>& outcomes) {
  Ids ids;
  for (const Outcome& o : outcomes) ids.push_back(o.id);
  return ids;
}

template <typename Slots>
Ids ids_of_slots(const Scheduler& s, const Slots& slots) {
  Ids ids;
  for (const std::int32_t slot : slots) ids.push_back(s.request(slot).id);
  return ids;
}

std::vector<std::int32_t> block_table(const Scheduler& s, std::int64_t id) {
  if (!s.config().track_blocks && !s.config().enable_prefix_caching) {
    throw std::invalid_argument("block tables are kept only with track_blocks or prefix caching");
  }
  for (const std::int32_t slot : s.running()) {
    if (s.request(slot).id == id) return s.block_table(slot);
  }
  return {};
}

void bind_config(nb::module_& m) {
  nb::enum_<Policy>(m, "Policy").value("fcfs", Policy::fcfs).value("priority", Policy::priority);
  nb::enum_<VllmVersion>(m, "VllmVersion")
      .value("v0_32", VllmVersion::v0_32)
      .value("v0_33", VllmVersion::v0_33);
  nb::class_<SchedulerConfig>(m, "SchedulerConfig", "Options of one scheduler under vLLM's own names.")
      .def(nb::init<>())
      .def_rw("max_num_batched_tokens", &SchedulerConfig::max_num_batched_tokens)
      .def_rw("max_num_seqs", &SchedulerConfig::max_num_seqs)
      .def_rw("max_num_active_seqs", &SchedulerConfig::max_num_active_seqs)
      .def_rw("max_model_len", &SchedulerConfig::max_model_len)
      .def_rw("block_size", &SchedulerConfig::block_size)
      .def_rw("num_gpu_blocks", &SchedulerConfig::num_gpu_blocks)
      .def_rw("long_prefill_token_threshold", &SchedulerConfig::long_prefill_token_threshold)
      .def_rw("long_prefill_token_threshold_adaptive", &SchedulerConfig::long_prefill_token_threshold_adaptive)
      .def_rw("prefill_schedule_interval", &SchedulerConfig::prefill_schedule_interval)
      .def_rw("watermark", &SchedulerConfig::watermark)
      .def_rw("policy", &SchedulerConfig::policy)
      .def_rw("vllm_version", &SchedulerConfig::vllm_version)
      .def_rw("enable_chunked_prefill", &SchedulerConfig::enable_chunked_prefill)
      .def_rw("enable_prefix_caching", &SchedulerConfig::enable_prefix_caching)
      .def_rw("scheduler_reserve_full_isl", &SchedulerConfig::scheduler_reserve_full_isl)
      .def_rw("async_scheduling", &SchedulerConfig::async_scheduling)
      .def_rw("track_blocks", &SchedulerConfig::track_blocks)
      .def_rw("shared_prefixes", &SchedulerConfig::shared_prefixes)
      .def("validate", &SchedulerConfig::validate, "Empty if every option is in range, else what is wrong.");
}

}  // namespace

void bind_scheduler(nb::module_& m) {
  bind_config(m);
  nb::enum_<EndReason>(m, "EndReason", nb::is_arithmetic())
      .value("none", EndReason::none)
      .value("stop", EndReason::stop)
      .value("length", EndReason::length)
      .value("abort", EndReason::abort)
      .value("kv_capacity", EndReason::kv_capacity)
      .value("exceeds_context", EndReason::exceeds_context);
  nb::class_<Batch>(m, "Batch", "The requests of one step.")
      .def_prop_ro(
          "entries",
          [](const Batch& b) {
            std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>> rows;
            for (const BatchEntry& e : b.entries) rows.emplace_back(e.id, e.start, e.num_tokens);
            return rows;
          },
          "(request id, tokens computed before, tokens in this batch), in batch order.");
  nb::class_<Scheduler>(m, "Scheduler", "vLLM's V1 scheduler for a text model, without a clock.")
      .def(nb::init<const SchedulerConfig&>())
      .def(
          "add",
          [](Scheduler& s, std::int64_t id, std::int64_t prompt_tokens, std::int64_t max_tokens,
             std::int64_t eos_at, std::int64_t priority, Picoseconds arrival_time,
             const std::vector<std::pair<std::uint64_t, std::int64_t>>& prompt, std::uint64_t first_output) {
            RequestSpec spec;
            spec.id = id;
            spec.num_prompt_tokens = prompt_tokens;
            spec.max_tokens = spec.visible_max_tokens = max_tokens;
            spec.eos_at = eos_at;
            spec.priority = priority;
            spec.arrival_time = arrival_time;
            std::vector<TokenRun> runs;
            for (const auto& [first, count] : prompt) runs.push_back({first, count});
            spec.prompt = runs;
            spec.first_output = first_output;
            s.add(spec);
          },
          nb::arg("id"), nb::arg("prompt_tokens"), nb::arg("max_tokens"), nb::arg("eos_at") = 0,
          nb::arg("priority") = 0, nb::arg("arrival_time") = 0,
          nb::arg("prompt") = std::vector<std::pair<std::uint64_t, std::int64_t>>{},
          nb::arg("first_output") = 0)
      .def("abort", [](Scheduler& s, std::int64_t id) { return s.abort(id) >= 0; }, nb::arg("id"))
      .def("has_requests", &Scheduler::has_requests)
      .def(
          "schedule",
          [](Scheduler& s) {
            Batch batch;
            std::vector<Outcome> preempted, failed;
            s.schedule(batch, nullptr, preempted, failed);
            return std::make_tuple(batch, ids_of(preempted), ids_of(failed));
          },
          "One pass: (batch, ids preempted, ids that can never fit).")
      .def(
          "update",
          [](Scheduler& s, const Batch& batch) {
            std::vector<Outcome> results;
            s.update(batch, results);
            std::vector<std::pair<std::int64_t, EndReason>> rows;
            for (const Outcome& r : results) rows.emplace_back(r.id, r.reason);
            return rows;
          },
          nb::arg("batch"), "Results of a batch: (id, end reason) of every request that got a token, in order.")
      .def_prop_ro("running", [](const Scheduler& s) { return ids_of_slots(s, s.running()); })
      .def_prop_ro("waiting", [](const Scheduler& s) { return ids_of_slots(s, s.waiting()); })
      .def_prop_ro("num_free_blocks", &Scheduler::num_free_blocks)
      .def("cached_tokens",
           [](const Scheduler& s, std::int64_t id) {
             for (const std::int32_t slot : s.running()) {
               if (s.request(slot).id == id) return std::int64_t{s.detail(slot).num_cached_tokens};
             }
             return std::int64_t{-1};
           },
           nb::arg("id"), "Prefix hit [tokens] of a running request at its first admission.")
      .def("block_table", &block_table, nb::arg("id"), "Block ids of a running request.");
}
