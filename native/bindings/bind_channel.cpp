#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "bindings.hpp"
#include "snapshot_channel.hpp"
#include "view.hpp"

namespace nb = nanobind;
using namespace simcluster;

namespace {

using MaybeNs = std::optional<std::int64_t>;
std::int64_t or_now(const MaybeNs& now_ns) { return now_ns ? *now_ns : monotonic_ns(); }

void bind_writer(nb::module_& m) {
  nb::class_<SnapshotWriter>(m, "SnapshotWriter",
                             "Publishes the snapshots of one instance in POSIX shared memory, for readers on this "
                             "machine.\n\n"
                             "The segment is /dev/shm/simcluster.NAME; whoever finds one that a dead process left "
                             "replaces it. Requests beyond `capacity` are left out and counted.\n"
                             "Raises ValueError for a bad name or capacity, RuntimeError if another process writes "
                             "under this name or the memory cannot be had.\n\n"
                             "Source: paper appendix F.")
      .def(nb::init<const std::string&, std::size_t, const SchedulerConfig&, std::size_t>(), nb::arg("name"),
           nb::arg("capacity"), nb::arg("config"), nb::arg("num_slots") = 4)
      .def(
          "publish",
          [](SnapshotWriter& w, const Engine& engine, std::int64_t origin_ns, double speed, const MaybeNs& now_ns) {
            w.publish(engine, {origin_ns, speed}, or_now(now_ns));
          },
          nb::arg("engine"), nb::arg("origin_ns") = 0, nb::arg("speed") = 1.0, nb::arg("now_ns").none() = nb::none(),
          "Publish an engine's state; origin_ns: CLOCK_MONOTONIC at the engine's 0, speed: its seconds per second.")
      .def(
          "publish",
          [](SnapshotWriter& w, const Snapshot& snapshot, std::int64_t origin_ns, double speed,
             const MaybeNs& now_ns) { w.publish(snapshot, {origin_ns, speed}, or_now(now_ns)); },
          nb::arg("snapshot"), nb::arg("origin_ns") = 0, nb::arg("speed") = 1.0, nb::arg("now_ns").none() = nb::none())
      .def("close", &SnapshotWriter::close, "Tell readers that this was all, and take the name back.")
      .def_prop_ro("is_closed", &SnapshotWriter::is_closed)
      .def_prop_ro("capacity", &SnapshotWriter::capacity)
      .def_prop_ro("num_published", &SnapshotWriter::num_published);
}

void bind_reader(nb::module_& m) {
  using Read = std::tuple<std::shared_ptr<const Snapshot>, std::optional<std::int64_t>, SourceState>;
  nb::class_<SnapshotReader>(m, "SnapshotReader",
                             "Reads what a SnapshotWriter of any process publishes under a name; it need not exist "
                             "yet.\n\n"
                             "Never waits: while the writer is too fast, or gone, the last good snapshot stays. A "
                             "writer that comes after another is met at the next read, at most 10 ms late. Instants "
                             "become picoseconds of a clock that is 0 at `epoch_ns` of CLOCK_MONOTONIC and runs `speed` "
                             "times as fast, which 64 bits hold for 106 days; earlier ones become 0. Raises ValueError "
                             "for a bad name or speed.")
      .def(nb::init<const std::string&, std::int64_t, double>(), nb::arg("name"), nb::arg("epoch_ns") = 0,
           nb::arg("speed") = 1.0)
      .def(
          "read",
          [](SnapshotReader& r, const MaybeNs& now_ns) -> Read {
            r.poll(or_now(now_ns));
            const auto& snapshot = r.snapshot();
            return {snapshot, snapshot ? std::optional(r.age_ns()) : std::nullopt, r.state()};
          },
          nb::arg("now_ns").none() = nb::none(),
          "Return (the newest snapshot or None, how long ago it was published [ns] or None, state of the writer).\n\n"
          "While the writer lives, an old snapshot is one since which nothing has happened.")
      .def(
          "refresh",
          [](SnapshotReader& r, InstanceView& view, const MaybeNs& now_ns) { r.refresh(view, or_now(now_ns)); },
          nb::arg("view"), nb::arg("now_ns").none() = nb::none(),
          "Read, and show a view the newest snapshot unless it would learn nothing from it.")
      .def_prop_ro("state", &SnapshotReader::state, "The writer at the last read.")
      .def_prop_ro("age_ns", &SnapshotReader::age_ns, "How old the snapshot was at the last read [ns].")
      .def_prop_ro("epoch_ns", &SnapshotReader::epoch_ns)
      .def_prop_ro("speed", &SnapshotReader::speed)
      .def_prop_ro("generation", [](const SnapshotReader& r) { return r.channel().generation(); },
                   "How many writers were met; a new one may have other options.")
      .def_prop_ro("num_changes", &SnapshotReader::num_changes, "Number of the snapshot, over all writers.")
      .def_prop_ro("num_published", [](const SnapshotReader& r) { return r.channel().number(); },
                   "Number of the snapshot, as this writer counts.")
      .def_prop_ro("num_misses", [](const SnapshotReader& r) { return r.channel().num_misses(); },
                   "Reads that kept an older snapshot because the writer was too fast.")
      .def_prop_ro("writer_pid", [](const SnapshotReader& r) { return r.channel().writer_pid(); },
                   "Process of the writer, as its own namespace numbers it; 0: none met yet.")
      .def_prop_ro("config", &SnapshotReader::config,
                   "Options of the instance. Raises RuntimeError before a writer was met.");
}

// The readers of a router's views, taken out of Python's lists once.
class SnapshotReaders {
 public:
  SnapshotReaders(const nb::typed<nb::list, SnapshotReader>& readers, const nb::typed<nb::list, InstanceView>& views) {
    if (readers.size() != views.size()) throw std::invalid_argument("one reader per view is needed");
    const auto add = [this]<typename Part>(nb::handle object, std::vector<Part*>& parts) {
      parts.push_back(nb::cast<Part*>(object));
      kept_.push_back(nb::borrow(object));
    };
    for (nb::handle each : readers) add(each, readers_);
    for (nb::handle each : views) add(each, views_);
  }

  // Returns who is late, by number.
  std::vector<std::size_t> refresh(std::int64_t now_ns, std::int64_t fresh_ns) {
    std::vector<std::size_t> late;
    for (std::size_t j = 0; j < readers_.size(); ++j) {
      SnapshotReader& reader = *readers_[j];
      reader.refresh(*views_[j], now_ns, false);
      if (reader.has_snapshot() && reader.age_ns() <= fresh_ns) continue;
      if (reader.state() != SourceState::live || !views_[j]->shows_idle()) late.push_back(j);
    }
    return late;
  }

  void ask(std::int64_t now_ns) {
    for (SnapshotReader* reader : readers_) reader->poll(now_ns);
  }

  std::uint64_t num_writers() const {
    std::uint64_t sum = 0;
    for (const SnapshotReader* reader : readers_) sum += reader->channel().generation();
    return sum;
  }

 private:
  std::vector<SnapshotReader*> readers_;
  std::vector<InstanceView*> views_;
  std::vector<nb::object> kept_;
};

void bind_readers(nb::module_& m) {
  nb::class_<SnapshotReaders>(m, "SnapshotReaders",
                              "The readers of views (j,), for reading all of them in one call.\n\n"
                              "Raises ValueError for another number of views than of readers.")
      .def(nb::init<const nb::typed<nb::list, SnapshotReader>&, const nb::typed<nb::list, InstanceView>&>(),
           nb::arg("readers"), nb::arg("views"))
      .def("refresh", &SnapshotReaders::refresh, nb::arg("now_ns"), nb::arg("fresh_ns"),
           "SnapshotReader.refresh for every view; the numbers of those whose snapshot was published over `fresh_ns` "
           "ago.\n\n"
           "An idle engine is none of them while its writer lives, since it has nothing to tell. Whether silent writers "
           "live is not asked here.")
      .def("ask", &SnapshotReaders::ask, nb::arg("now_ns"),
           "Ask the kernel whether silent writers live, and meet new ones; half a microsecond for each.")
      .def_prop_ro("num_writers", &SnapshotReaders::num_writers, "How many writers were met, by all readers together.");
}

}  // namespace

void bind_channel(nb::module_& m) {
  m.def("monotonic_ns", &monotonic_ns, "CLOCK_MONOTONIC [ns], the clock of published snapshots.");
  nb::enum_<SourceState>(m, "SourceState", "What is known of the writer of snapshots.")
      .value("missing", SourceState::missing, "There was none yet.")
      .value("live", SourceState::live, "It holds the segment.")
      .value("closed", SourceState::closed, "It ended in good order.")
      .value("dead", SourceState::dead, "It is gone without a word.");
  bind_writer(m);
  bind_reader(m);
  bind_readers(m);
}
