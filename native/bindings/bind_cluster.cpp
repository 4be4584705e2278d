#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <tuple>

#include "bindings.hpp"
#include "cluster.hpp"

namespace nb = nanobind;
using namespace simcluster;

namespace {

using Int64Column = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Int64Matrix = nb::ndarray<const std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using BoolColumn = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Snapshots of every instance at one instant; opaque in Python.
struct Captured {
  std::vector<std::shared_ptr<const Snapshot>> snapshots;
};

template <typename Array>
auto span_of(const Array& array) {
  return std::span(array.data(), array.size());
}

// An engine written in Python behind the native interface; simcluster/backends/base.py says what it must offer.
class PythonPort final : public EnginePort {
 public:
  explicit PythonPort(nb::object engine) : engine_(std::move(engine)) {}

  bool submit(const Submission& s) override {
    nb::list prompt;
    for (const TokenRun& run : s.prompt) prompt.append(nb::make_tuple(run.first, run.count));
    return nb::cast<bool>(engine_.attr("submit")(s.id, s.prompt_tokens, s.output_tokens, s.at, s.max_tokens,
                                                 s.ends_by_length, s.priority, s.arrival_time, prompt));
  }
  void cancel(std::int64_t id, Picoseconds at) override { engine_.attr("cancel")(id, at); }
  void advance_to(Picoseconds t) override {
    engine_.attr("advance_to")(t);
    ++num_changes_;
  }
  void take_events(std::vector<Event>& events) override {
    const auto table = nb::cast<Int64Matrix>(engine_.attr("take_events")());
    if (table.shape(1) != 5) throw std::invalid_argument("take_events must return rows of 5 numbers");
    for (std::size_t k = 0; k < table.shape(0); ++k) {
      const std::int64_t* row = table.data() + 5 * k;
      events.push_back({row[0], row[1], row[2], static_cast<EventKind>(row[3]), static_cast<EndReason>(row[4])});
    }
  }
  Snapshot snapshot() const override { return nb::cast<Snapshot&>(engine_.attr("snapshot")()); }
  Load load() const override {
    const auto number = [&](const char* name) { return nb::cast<std::int64_t>(engine_.attr(name)); };
    const auto prefix = nb::cast<std::vector<std::int64_t>>(engine_.attr("prefix_stats"));
    return {number("num_running"), number("num_waiting"), number("num_free_blocks"), number("num_preemptions"),
            number("num_steps"),   number("busy_time"),   prefix.at(0),              prefix.at(1),
            prefix.at(2),          prefix.at(3)};
  }
  Picoseconds next_end() const override { return nb::cast<Picoseconds>(engine_.attr("next_end")()); }
  Picoseconds next_change() const override { return 0; }  // it does not say
  std::uint64_t num_changes() const override { return num_changes_; }

 private:
  nb::object engine_;
  std::uint64_t num_changes_ = 0;
};

// The Python objects whose memory a cluster uses.
struct Owned {
  std::vector<nb::object> objects;
  std::vector<Int64Matrix> matrices;
  std::vector<Int64Column> columns;
  BoolColumn flags;
};

struct BoundCluster : Owned, Cluster {  // in this order, so that what it owns outlives the cluster
  using Cluster::Cluster;
};

Cluster::Requests requests_of(const Int64Matrix& prompt_tokens, const Int64Matrix& output_tokens,
                              const Int64Matrix& predicted_output, const Int64Column& max_tokens,
                              const Int64Column& priority, const Int64Column& cancel_after,
                              const BoolColumn& ends_by_length) {
  Cluster::Requests r;
  r.num_groups = prompt_tokens.shape(1);
  r.prompt_tokens = span_of(prompt_tokens);
  r.output_tokens = span_of(output_tokens);
  r.predicted_output = span_of(predicted_output);
  r.max_tokens = span_of(max_tokens);
  r.priority = span_of(priority);
  r.cancel_after = span_of(cancel_after);
  r.ends_by_length = span_of(ends_by_length);
  return r;
}

Int64Table table_of(const std::vector<Cluster::Row>& rows) {
  std::vector<std::int64_t> values;
  values.reserve(rows.size() * 11);
  for (const Cluster::Row& r : rows) {
    values.insert(values.end(), {r.request, r.arrival, r.instance, r.scheduled, r.first_token, r.end, r.output_tokens,
                                 r.cached_tokens, r.preemptions, static_cast<std::int64_t>(r.status),
                                 static_cast<std::int64_t>(r.reason)});
  }
  return to_table(std::move(values), 11);
}

using Notices = std::vector<std::tuple<std::int64_t, std::int64_t, Picoseconds>>;

Notices take_notices(Cluster& cluster) {
  Notices rows;
  rows.reserve(cluster.notices().size());
  for (const Cluster::Notice& n : cluster.notices()) {
    rows.emplace_back(n.request, static_cast<std::int64_t>(n.kind), n.seen);
  }
  cluster.notices().clear();
  return rows;
}

Int64Table loads_of(const Cluster& cluster) {
  std::vector<std::int64_t> values;
  for (std::size_t j = 0; j < cluster.num_instances(); ++j) {
    const EnginePort::Load load = cluster.load(j);
    values.insert(values.end(), load.begin(), load.end());
  }
  return to_table(std::move(values), EnginePort::kLoadColumns);
}

}  // namespace

void bind_cluster(nb::module_& m) {
  nb::enum_<Cluster::Watch>(m, "Watch")
      .value("nothing", Cluster::Watch::nothing)
      .value("ends", Cluster::Watch::ends)
      .value("first_tokens_and_ends", Cluster::Watch::first_tokens_and_ends);
  nb::class_<Captured>(m, "Captured", "Snapshots of every instance at one instant.");
  nb::class_<BoundCluster>(m, "Cluster",
                           "The engines of one run behind one interface, and what happened to the requests.\n\n"
                           "It holds the truth: never hand it to a router.")
      .def(
          "__init__",
          [](BoundCluster* self, const Int64Matrix& prompt_tokens, const Int64Matrix& output_tokens,
             const Int64Matrix& predicted_output, const Int64Column& max_tokens, const Int64Column& priority,
             const Int64Column& cancel_after, const BoolColumn& ends_by_length,
             const std::optional<std::tuple<Int64Column, Int64Column, std::int64_t>>& prefix, bool routers_know_ends,
             bool in_order, Cluster::Watch watch) {
            Cluster::Requests requests = requests_of(prompt_tokens, output_tokens, predicted_output, max_tokens,
                                                     priority, cancel_after, ends_by_length);
            requests.routers_know_ends = routers_know_ends;
            if (prefix) {
              requests.prefix_offsets = span_of(std::get<0>(*prefix));
              requests.prefix_values = span_of(std::get<1>(*prefix));
              requests.prefix_block = std::get<2>(*prefix);
            }
            new (self) BoundCluster(requests, in_order, watch);
            self->matrices = {prompt_tokens, output_tokens, predicted_output};
            self->columns = {max_tokens, priority, cancel_after};
            self->flags = ends_by_length;
            if (prefix) {
              self->columns.push_back(std::get<0>(*prefix));
              self->columns.push_back(std::get<1>(*prefix));
            }
          },
          nb::arg("prompt_tokens"), nb::arg("output_tokens"), nb::arg("predicted_output"), nb::arg("max_tokens"),
          nb::arg("priority"), nb::arg("cancel_after"), nb::arg("ends_by_length"), nb::arg("prefix").none(),
          nb::arg("routers_know_ends"), nb::arg("in_order"), nb::arg("watch"),
          "n requests; the first three columns are (n, groups) [tokens], output_tokens is the truth; cancel_after [ps].\n\n"
          "prefix: offsets (n + 1,), dense hashes, and prompt tokens that one covers. in_order: requests are sent by\n"
          "ascending number.")
      .def(
          "add_instance",
          [](BoundCluster& c, nb::object engine, std::size_t group, double request_s, double per_prompt_token_s,
             Picoseconds output_hop, bool shares_prefixes, bool asynchronous) {
            std::unique_ptr<EnginePort> port;
            if (nb::isinstance<Engine>(engine)) {
              port = std::make_unique<NativePort>(nb::cast<Engine&>(engine));
            } else {
              port = std::make_unique<PythonPort>(engine);
            }
            c.add_instance(std::move(port),
                           {group, request_s, per_prompt_token_s, output_hop, shares_prefixes, asynchronous});
            c.objects.push_back(std::move(engine));
          },
          nb::arg("engine"), nb::arg("group"), nb::arg("request_s"), nb::arg("per_prompt_token_s"),
          nb::arg("output_hop"), nb::arg("shares_prefixes"), nb::arg("asynchronous"),
          "The next instance; times [s], output_hop [ps]. The engine is driven by the cluster alone from now on.")
      .def(
          "add_router",
          [](BoundCluster& c, const nb::typed<nb::list, InstanceView>& views) {
            std::vector<InstanceView*> pointers;
            for (const nb::handle view : views) {
              pointers.push_back(nb::cast<InstanceView*>(view));
              c.objects.push_back(nb::borrow(view));
            }
            return c.add_router(std::move(pointers));
          },
          nb::arg("views"), "A router with these views (j,); returns its number.")
      .def("advance", &Cluster::advance, nb::arg("t"), "Every instance processes what ends at or before t [ps].")
      .def("refresh", &Cluster::refresh, nb::arg("router"), nb::arg("t"),
           "Show a router the newest step boundary of every instance at t [ps]; costs only where there is a new one.")
      .def("capture", [](BoundCluster& c, Picoseconds t) { return Captured{c.capture(t)}; },
           nb::arg("t"), "The newest step boundary of every instance at t [ps], to be shown later.")
      .def("show", [](BoundCluster& c, std::size_t router, const Captured& s) { c.show(router, s.snapshots); },
           nb::arg("router"), nb::arg("snapshots"))
      .def("shown",
           [](BoundCluster& c, std::size_t router) {
             std::vector<std::shared_ptr<Snapshot>> copies;
             for (const auto& s : c.shown(router)) copies.push_back(s ? std::make_shared<Snapshot>(*s) : nullptr);
             return copies;
           },
           nb::arg("router"), "Copies of what a router has been shown last, None where nothing; for tests.")
      .def("dispatch",
           [](BoundCluster& c, std::int64_t request, std::size_t instance, Picoseconds now, Picoseconds sent,
              std::size_t router) { c.dispatch(request, instance, now, sent, router); },
           nb::arg("request"), nb::arg("instance"), nb::arg("now"), nb::arg("sent"), nb::arg("router"),
           "A request arrives at `now` and leaves for an instance at `sent` [ps]; `router`'s view notes it, or NOBODY's.")
      .def("turn_away", &Cluster::turn_away, nb::arg("request"), nb::arg("now"),
           "A request arrives at `now` [ps] and is sent nowhere.")
      .def("next_end", &Cluster::next_end, nb::arg("horizon"),
           "When to call take_ends() [ps] to be told of the next end of a request if nothing happens up to the horizon;\n"
           "beyond the horizon, an instant before which there is none. NEVER if there is none.")
      .def("take_ends",
           [](BoundCluster& c, Picoseconds t) {
             c.advance_to_ends(t);
             return take_notices(c);
           },
           nb::arg("t"), "Take notices, those of all ends up to t [ps] among them.")
      .def("take_notices", [](BoundCluster& c) { return take_notices(c); },
           "What clients were told since the last call, as watched: (request, kind, seen at [ps]).")
      .def("loads", [](const BoundCluster& c) { return loads_of(c); }, nb::rv_policy::automatic,
           "Per instance (running, waiting, free blocks, preemptions, steps, busy [ps], prefix queries, prefix hits, and "
           "both of preempted requests), (j, 10).")
      .def_prop_ro("num_open", &Cluster::num_open, "Requests sent and not ended.")
      .def_prop_ro("num_sent", &Cluster::num_sent, "Requests that have arrived.")
      .def("num_ready", &Cluster::num_ready, nb::arg("least"),
           "How many of the oldest rows are final, `least` or a few more; 0 if fewer.")
      .def("take_rows", [](BoundCluster& c, std::size_t count) { return table_of(c.take_rows(count)); },
           nb::arg("count"), nb::rv_policy::automatic,
           "The oldest rows in order of sending: (request, arrival, instance, scheduled, first token, end, output tokens, "
           "cached tokens, preemptions, status, reason), (k, 11); instants [ps], -1 for those that did not come.")
      .def("finish", &Cluster::finish, nb::arg("clock"), nb::arg("cut"),
           "Fix the end of the run [ps]; with `cut`, what has not reached its client by then did not happen.");
  m.attr("NOBODY") = Cluster::kNobody;
}
