#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <tuple>
#include <vector>

#include "bindings.hpp"
#include "stream_relay.hpp"

namespace nb = nanobind;
using namespace simcluster;

namespace {

std::string_view view_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

void bind_counter(nb::module_& m) {
  nb::class_<EventCounter>(m, "EventCounter",
                           "Counts the events of a stream while its bytes pass by, and keeps the last 2,048 bytes.")
      .def(nb::init<>())
      .def(
          "feed", [](EventCounter& c, const nb::bytes& piece) { c.feed(view_of(piece)); }, nb::arg("piece"),
          "Count the ends of events, two line feeds each, in bytes that pass by.")
      .def(
          "keep", [](EventCounter& c, const nb::bytes& piece) { c.keep(view_of(piece)); }, nb::arg("piece"),
          "Note bytes whose events are counted elsewhere.")
      .def_rw("events", &EventCounter::events, "So many so far; whoever knows better may set it.")
      .def_prop_ro("tail", [](const EventCounter& c) { return nb::bytes(c.tail().data(), c.tail().size()); });
}

}  // namespace

void bind_relay(nb::module_& m) {
  bind_counter(m);
  nb::enum_<FlowEnd>(m, "FlowEnd", "Why a stream flows no more.")
      .value("whole", FlowEnd::whole, "Its body has ended; the last piece is left to the caller.")
      .value("server_left", FlowEnd::server_left, "Before the end.")
      .value("bad_framing", FlowEnd::bad_framing, "What the server sends is not in chunks.")
      .value("client_left", FlowEnd::client_left);
  using News = std::tuple<std::vector<StreamRelay::Id>, std::vector<std::tuple<StreamRelay::Id, FlowEnd, nb::bytes, bool>>>;
  nb::class_<StreamRelay>(m, "StreamRelay",
                          "Passes answers in chunks on from sockets of servers to those of clients, without a thread: "
                          "call `pump` whenever `file` can be read.\n\n"
                          "Source: RFC 9112, section 7.1 (chunks).")
      .def(nb::init<>())
      .def_prop_ro("file", &StreamRelay::file, "A descriptor that can be read when there is something to do.")
      .def("add", &StreamRelay::add, nb::arg("server"), nb::arg("client"), nb::arg("counter"), nb::arg("in_chunks"),
           "Take over a stream between two descriptors that do not block, and return its number.\n\n"
           "The server's body stands between two chunks, and the client was given all before. Nobody else may read the "
           "one or write to the other until `remove`. `in_chunks`: the client gets chunks, too.\n"
           "Raises RuntimeError if there are too many open files.")
      .def("remove", &StreamRelay::remove, nb::arg("id"), "Let go of a stream; its sockets stay open.")
      .def("waits_for_client", &StreamRelay::waits_for_client, nb::arg("id"))
      .def_prop_ro("num_streams", &StreamRelay::num_streams)
      .def(
          "pump",
          [](StreamRelay& relay) {
            const StreamRelay::News& news = relay.pump();
            News told;
            std::get<0>(told) = news.moved;
            for (const auto& each : news.ended) {
              std::get<1>(told).emplace_back(each.id, each.end, nb::bytes(each.last.data(), each.last.size()),
                                             each.is_clean);
            }
            return told;
          },
          "Pass on what has come, and return which streams moved, and which ended, why, with what content that the client "
          "was not given, and whether nothing came behind the body. Never waits.");
}
