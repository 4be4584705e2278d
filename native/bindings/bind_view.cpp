#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <limits>
#include <memory>
#include <stdexcept>
#include <tuple>

#include "bindings.hpp"
#include "snapshot_bytes.hpp"
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

// A request of an engine that is not the native one, in the order of the fields of RequestState.
using RequestRow = std::array<std::int64_t, 16>;
// Start [ps], prefills (tokens, context before), decodes (context before) and entries (request, tokens, sample index).
using BatchRow = std::tuple<Picoseconds, std::vector<std::pair<std::int64_t, std::int64_t>>, std::vector<std::int64_t>,
                            std::vector<std::tuple<std::int32_t, std::int64_t, std::int64_t>>>;

std::int32_t count_of(std::int64_t value) {
  if (value < -1 || value > std::numeric_limits<std::int32_t>::max()) {
    throw std::invalid_argument("a count of tokens, blocks or preemptions is out of range");
  }
  return static_cast<std::int32_t>(value);
}

void add_request(Snapshot& s, const RequestRow& row) {
  RequestState& r = s.requests.emplace_back();
  RequestDetail& d = s.details.emplace_back();
  d.sequence = static_cast<std::uint32_t>(s.details.size());
  r.id = row[0];
  r.num_prompt_tokens = count_of(row[1]);
  r.num_output_tokens = count_of(row[2]);
  r.max_tokens = d.visible_max_tokens = count_of(row[3]);
  r.num_computed_tokens = count_of(row[4]);
  if (row[5] < 0 || row[5] > 2) throw std::invalid_argument("a request has 0 to 2 placeholders");
  r.num_output_placeholders = static_cast<std::int8_t>(row[5]);
  r.num_inflight_tokens = count_of(row[6]);
  r.num_stale_tokens = count_of(row[7]);
  r.num_sampled_tokens = count_of(row[8]);
  r.num_blocks = count_of(row[9]);
  d.num_cached_tokens = count_of(row[10]);
  d.num_preemptions = count_of(row[11]);
  d.priority = row[12];
  d.arrival_time = row[13];
  r.status = static_cast<Status>(row[14]);
  r.is_prefill_chunk = row[15] != 0;
}

std::shared_ptr<Snapshot> from_state(Picoseconds taken_at, Picoseconds boundary, Picoseconds intake,
                                     bool waiting_for_batch, bool unflushed_ends, bool capacity_bound,
                                     std::int64_t num_executed, std::int64_t last_prefill,
                                     std::int64_t num_free_blocks, std::int64_t num_running,
                                     const std::vector<RequestRow>& requests, const std::vector<BatchRow>& in_flight) {
  auto s = std::make_shared<Snapshot>();
  s->taken_at = taken_at;
  s->boundary = boundary;
  s->intake = intake;
  s->waiting_for_batch = waiting_for_batch;
  s->unflushed_ends = unflushed_ends;
  s->capacity_bound = capacity_bound;
  s->num_executed = num_executed;
  s->last_prefill = last_prefill;
  s->num_free_blocks = num_free_blocks;
  s->num_running = num_running;
  for (const RequestRow& row : requests) add_request(*s, row);
  const auto count = static_cast<std::int32_t>(requests.size());
  if (num_running < 0 || num_running > count) throw std::invalid_argument("num_running must be 0 to the requests");
  for (const auto& [start, prefills, decodes, entries] : in_flight) {
    Snapshot::BatchInFlight& batch = s->in_flight.emplace_back();
    batch.start = start;
    for (const auto& [tokens, context] : prefills) batch.features.add(context, tokens, false);
    for (const std::int64_t context : decodes) batch.features.add(context, 1, true);
    for (const auto& [request, tokens, sample_index] : entries) {
      if (request < -1 || request >= count) throw std::invalid_argument("an entry names a request that is not there");
      batch.entries.push_back({request, count_of(tokens), count_of(sample_index)});
    }
  }
  s->fold_decodes();
  return s;
}

// One value of every view, written into an array of the caller's, which costs less than a new one.
template <typename Value, typename Get>
void write_each(const nb::list& views, nb::ndarray<Value, nb::ndim<1>, nb::c_contig, nb::device::cpu> out, Get get) {
  if (out.size() != views.size()) throw std::invalid_argument("one value per view is needed");
  Value* place = out.data();
  for (const nb::handle view : views) *place++ = get(*nb::cast<InstanceView*>(view));
}

void bind_snapshot(nb::module_& m) {
  nb::class_<Snapshot>(m, "Snapshot", "What an instance publishes about itself.")
      .def_static("capture", [](const Engine& e) { return std::make_shared<Snapshot>(Snapshot::capture(e)); },
                  nb::arg("engine"))
      .def_static("from_state", &from_state, nb::kw_only(), nb::arg("taken_at"), nb::arg("boundary"),
                  nb::arg("intake"), nb::arg("waiting_for_batch"), nb::arg("unflushed_ends"),
                  nb::arg("capacity_bound"), nb::arg("num_executed"), nb::arg("last_prefill"),
                  nb::arg("num_free_blocks"), nb::arg("num_running"), nb::arg("requests"), nb::arg("in_flight"),
                  "The snapshot of an engine that is not the native one.\n\n"
                  "requests: running, then waiting: (id, prompt, output, max_tokens, computed, placeholders, in flight, "
                  "stale, sampled, blocks, cached, preemptions, priority, arrival_time, status, unfinished prefill), "
                  "status 0 waiting, 1 running, 2 preempted. in_flight: batches (start [ps], prefills (tokens, context "
                  "before), decodes (context before), entries (index into requests or -1, tokens, sample index)).")
      .def(
          "to_bytes",
          [](const Snapshot& s) {
            const std::string bytes = to_bytes(s);
            return nb::bytes(bytes.data(), bytes.size());
          },
          "Return the snapshot as bytes that from_bytes() of any machine takes.\n\n"
          "Raises ValueError for more than two batches in flight.")
      .def_static(
          "from_bytes",
          [](const nb::bytes& bytes) {
            return std::make_shared<Snapshot>(from_bytes({bytes.c_str(), bytes.size()}));
          },
          nb::arg("bytes"),
          "Return the snapshot that to_bytes() was called of; it restores and is estimated from alike.\n\n"
          "Raises ValueError for bytes that are damaged, of another layout or no snapshot at all.")
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
      .def_prop_ro("left_out",
                   [](const Snapshot& s) {
                     return std::tuple(s.left_out.num_running, s.left_out.num_waiting, s.left_out.prefill_tokens);
                   },
                   "Residents that found no room in a published snapshot: (running, waiting, tokens to prefill).")
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
                                       r.num_output_placeholders, r.num_blocks, r.max_tokens,
                                       static_cast<std::int64_t>(r.status)});
            }
            return to_table(std::move(rows), 8);
          },
          nb::rv_policy::automatic,  // the table owns its rows
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
      .def("forget_dispatch", &InstanceView::forget_dispatch, nb::arg("id"),
           "Forget a request of this router that has ended or never arrived; only needed with published snapshots.")
      .def(
          "simulate_first_token",
          [](InstanceView& v, std::int64_t id, std::int64_t prompt_tokens, std::int64_t predicted_output,
             Picoseconds at, std::int64_t max_tokens, bool ends_by_length, std::int64_t priority,
             Picoseconds arrival_time, bool fast) {
            return v.simulate_first_token({id, prompt_tokens, predicted_output, max_tokens, ends_by_length, priority,
                                           arrival_time, at},
                                          fast);
          },
          nb::arg("id"), nb::arg("prompt_tokens"), nb::arg("predicted_output"), nb::arg("at"),
          nb::arg("max_tokens") = -1, nb::arg("ends_by_length") = false, nb::arg("priority") = 0,
          nb::arg("arrival_time") = 0, nb::arg("fast") = true,
          "What estimate_first_token() finds, by simulating from the snapshot; with fast off step by step.")
      .def_prop_ro("num_running", &InstanceView::num_running)
      .def_prop_ro("num_waiting", &InstanceView::num_waiting)
      .def_prop_ro("num_resident", &InstanceView::num_resident)
      .def_prop_ro("num_dispatched_since", &InstanceView::num_dispatched_since)
      .def_prop_ro("prefill_tokens_left", &InstanceView::prefill_tokens_left,
                   "Tokens to compute before every resident request decodes; prefix hits of waiting ones unknown.")
      .def_prop_ro("decode_tokens_left", &InstanceView::decode_tokens_left,
                   "Output tokens expected of every resident request, by own predictions, else by mean_output.")
      .def_prop_ro("kv_usage", &InstanceView::kv_usage, "Share of the KV blocks in use at the snapshot.")
      .def_prop_ro("boundary", [](InstanceView& v) { return v.snapshot().boundary; })
      .def_prop_ro("num_free_blocks", [](InstanceView& v) { return v.snapshot().num_free_blocks; });

  using Counts = nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  using Shares = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  using Views = nb::typed<nb::list, InstanceView>;
  const auto def_counts = [&](const char* name, auto get) {
    m.def(name, [get](const Views& views, const Counts& out) { write_each<std::int64_t>(views, out, get); },
          nb::arg("views"), nb::arg("out"), "Write this number of every view (j,) into an array (j,).");
  };
  def_counts("num_waiting", [](InstanceView& v) { return v.num_waiting(); });
  def_counts("num_running", [](InstanceView& v) { return v.num_running(); });
  def_counts("num_resident", [](InstanceView& v) { return v.num_resident(); });
  def_counts("tokens_left", [](InstanceView& v) { return v.prefill_tokens_left() + v.decode_tokens_left(); });
  m.def("kv_usage",
        [](const Views& views, const Shares& out) {
          write_each<double>(views, out, [](InstanceView& v) { return v.kv_usage(); });
        },
        nb::arg("views"), nb::arg("out"), "Write the share of KV blocks in use of every view (j,) into an array (j,).");

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
