// Reads the state of a Python scheduler, vLLM's, into a snapshot, fast enough for the engine's own loop. What never
// changes of a request is kept; the rest is read from its attributes, whose names are vLLM's.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <deque>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "snapshot_channel.hpp"

namespace nb = nanobind;
using namespace simcluster;

namespace {

std::int64_t number_of(nb::handle value) {
  const long long number = PyLong_AsLongLong(value.ptr());
  if (number == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return number;
}

nb::object attribute(nb::handle object, nb::handle name) {
  PyObject* const value = PyObject_GetAttr(object.ptr(), name.ptr());
  if (value == nullptr) throw nb::python_error();
  return nb::steal(value);
}

std::int32_t count_of(nb::handle object, nb::handle name) { return narrow(number_of(attribute(object, name))); }

// Calls f(item) for the items of any iterable until it says false.
template <typename F>
void for_each_while(nb::handle items, F f) {
  const nb::object iterator = nb::steal(PyObject_GetIter(items.ptr()));
  if (!iterator.is_valid()) throw nb::python_error();
  while (PyObject* item = PyIter_Next(iterator.ptr())) {
    const nb::object held = nb::steal(item);
    if (!f(held)) return;
  }
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
}

class SchedulerWatch {
 public:
  SchedulerWatch(SnapshotWriter& writer, const SchedulerConfig& config) : writer_(writer), config_(config) {}

  // A request that has come; a known one is read anew.
  void add(nb::object request, std::int64_t id, std::int64_t arrival_ns) {
    const nb::object text = attribute(request, names_.request_id);
    const std::int32_t slot = find(text) >= 0 ? find(text) : new_slot(text, request);
    Known& k = known_[static_cast<std::size_t>(slot)];
    prompt_tokens_ -= k.state.num_prompt_tokens;
    k.outputs = attribute(request, names_.output_token_ids);
    if (!PyList_Check(k.outputs.ptr())) throw nb::type_error("a request's _output_token_ids is not a list");
    k.state.id = id;
    k.state.num_prompt_tokens = count_of(request, names_.num_prompt_tokens);
    const std::int64_t room = config_.max_model_len - k.state.num_prompt_tokens;
    k.state.max_tokens = narrow(std::min(number_of(attribute(request, names_.max_tokens)), room));
    k.detail.visible_max_tokens = k.state.max_tokens;
    k.detail.priority = number_of(attribute(request, names_.priority));
    k.detail.arrival_time = arrival_ns;
    prompt_tokens_ += k.state.num_prompt_tokens;
  }

  // A pass was made: its tokens by request id, who was preempted since the last one, and when the loop has done so.
  void begin(const nb::typed<nb::dict, nb::str, int>& num_scheduled_tokens, nb::handle preempted_ids,
             std::int64_t now_ns) {
    for_each_while(preempted_ids, [&](const nb::object& text) {
      if (const std::int32_t slot = find(text); slot >= 0) {
        Known& k = known_[static_cast<std::size_t>(slot)];
        k.detail.num_preemptions = count_of(k.request, names_.num_preemptions);
      }
      return true;
    });
    Flight& flight = flights_.emplace_back();
    flight.start = now_ns;
    flight.entries.reserve(num_scheduled_tokens.size());
    std::size_t guess = 0;  // a batch has the running in their order
    for (const auto [text, tokens] : num_scheduled_tokens) {
      std::int32_t slot = guess < running_slots_.size() ? running_slots_[guess++] : -1;
      if (slot < 0 || known_[static_cast<std::size_t>(slot)].text.ptr() != text.ptr()) slot = find(text);
      if (slot < 0) throw std::runtime_error("a request was scheduled that nobody has added");
      enter(flight, slot, narrow(number_of(tokens)));
    }
  }

  // The results of the oldest batch have come, at this time.
  void end(std::int64_t now_ns) {
    if (flights_.empty()) return;
    for (const Entry& e : flights_.front().entries) {
      Known& k = known_[static_cast<std::size_t>(e.slot)];
      if (k.serial != e.serial) continue;
      k.state.num_inflight_tokens -= e.tokens;
      k.sampled_in_flight -= e.sample_index >= 0 ? 1 : 0;
    }
    flights_.pop_front();
    if (!flights_.empty()) flights_.front().start = std::max(flights_.front().start, now_ns);
  }

  std::size_t num_in_flight() const { return flights_.size(); }
  std::size_t num_known() const { return by_request_.size(); }

  // Those that have ended leave, as vLLM names them until its next pass.
  void drop(nb::handle ended_ids) {
    for_each_while(ended_ids, [&](const nb::object& text) {
      if (const std::int32_t slot = find(text); slot >= 0) remove(slot);
      return true;
    });
  }

  // Whoever is not in vLLM's dict of requests leaves.
  void keep_only(const nb::typed<nb::dict, nb::str, nb::any>& requests) {
    for (std::size_t slot = 0; slot < known_.size(); ++slot) {
      const Known& k = known_[slot];
      if (!k.request.is_valid()) continue;
      const int here = PyDict_Contains(requests.ptr(), k.text.ptr());
      if (here < 0) throw nb::python_error();
      if (here == 0) remove(static_cast<std::int32_t>(slot));
    }
  }

  // waiting: in vLLM's order; under the priority policy unused, since asking its heap for an order costs too much.
  void publish(const nb::typed<nb::list, nb::any>& running, nb::handle waiting, std::int64_t num_waiting,
               std::int64_t num_free_blocks, bool waiting_for_batch, bool unflushed_ends, bool capacity_bound,
               std::int64_t num_executed, std::int64_t last_prefill, std::int64_t now_ns) {
    shot_.boundary = shot_.taken_at = now_ns;
    shot_.waiting_for_batch = waiting_for_batch;
    shot_.unflushed_ends = unflushed_ends;
    shot_.capacity_bound = capacity_bound;
    shot_.num_executed = num_executed;
    shot_.last_prefill = last_prefill;
    shot_.num_free_blocks = num_free_blocks;
    shot_.requests.clear();
    shot_.details.clear();
    ++round_;
    read_running(running);
    read_waiting(waiting);
    tell_batches();
    const auto shown = static_cast<std::int64_t>(shot_.requests.size()) - shot_.num_running;
    std::int64_t prompts = prompt_tokens_;
    for (const RequestState& r : shot_.requests) prompts -= r.num_prompt_tokens;
    const std::int64_t more = static_cast<std::int64_t>(running.size()) - shot_.num_running;
    shot_.left_out = {more, std::max<std::int64_t>(num_waiting - shown, 0), 0};
    if (shot_.left_out.num_waiting > 0 && more == 0) shot_.left_out.prefill_tokens = prompts;
    shot_.fold_decodes();
    writer_.publish(shot_, kNanoseconds, now_ns);
  }

 private:
  struct Names {  // interned once: attributes are found by identity
    nb::object request_id = intern("request_id"), output_token_ids = intern("_output_token_ids"),
               num_prompt_tokens = intern("num_prompt_tokens"), max_tokens = intern("max_tokens"),
               priority = intern("priority"), num_computed_tokens = intern("num_computed_tokens"),
               num_output_placeholders = intern("num_output_placeholders"),
               is_prefill_chunk = intern("is_prefill_chunk"), num_preemptions = intern("num_preemptions"),
               num_stale_output_tokens = intern("num_stale_output_tokens");

    static nb::object intern(const char* name) { return nb::steal(PyUnicode_InternFromString(name)); }
  };
  struct Known {
    nb::object request, text, outputs;  // request: null in a free slot; text: its id
    RequestState state;
    RequestDetail detail;
    std::uint64_t serial = 0;            // which request of this slot
    std::uint64_t round = 0;             // of the last snapshot with it
    std::int32_t place = -1;             // in that
    std::int32_t sampled_in_flight = 0;  // tokens
    bool admitted = false;
  };
  struct Entry {
    std::int32_t slot = -1;
    std::int32_t tokens = 0;
    std::int32_t sample_index = -1;
    std::uint64_t serial = 0;
  };
  struct Flight {
    std::int64_t start = 0;
    StepFeatures features;
    std::vector<Entry> entries;
  };
  static constexpr InstanceClock kNanoseconds{.per_ns = 1};

  std::int32_t find(nb::handle text) const {
    PyObject* const slot = PyDict_GetItemWithError(by_text_.ptr(), text.ptr());
    if (slot != nullptr) return static_cast<std::int32_t>(PyLong_AsLong(slot));
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return -1;
  }

  std::int32_t new_slot(const nb::object& text, const nb::object& request) {
    auto slot = static_cast<std::int32_t>(known_.size());
    if (free_slots_.empty()) {
      known_.emplace_back();
    } else {
      slot = free_slots_.back();
      free_slots_.pop_back();
    }
    Known& k = known_[static_cast<std::size_t>(slot)];
    k = Known{};
    k.request = request;
    k.text = text;
    k.serial = ++serials_;
    by_text_[text] = nb::int_(slot);
    by_request_[request.ptr()] = slot;
    return slot;
  }

  void remove(std::int32_t slot) {
    Known& k = known_[static_cast<std::size_t>(slot)];
    prompt_tokens_ -= k.state.num_prompt_tokens;
    by_request_.erase(k.request.ptr());
    nb::del(by_text_[k.text]);
    k = Known{};
    free_slots_.push_back(slot);
  }

  void enter(Flight& flight, std::int32_t slot, std::int32_t tokens) {
    Known& k = known_[static_cast<std::size_t>(slot)];
    k.state.num_computed_tokens = count_of(k.request, names_.num_computed_tokens);
    const std::int32_t start = k.state.num_computed_tokens - tokens;  // they are counted already
    if (!k.admitted) k.detail.num_cached_tokens = start;
    k.admitted = true;
    // Who decodes and was never preempted has no known token left to compute.
    k.state.is_prefill_chunk = (start < k.state.num_prompt_tokens || k.detail.num_preemptions > 0) &&
                               number_of(attribute(k.request, names_.is_prefill_chunk)) != 0;
    k.state.num_inflight_tokens += tokens;
    std::int32_t sample_index = -1;
    if (!k.state.is_prefill_chunk) {
      sample_index = narrow(PyList_GET_SIZE(k.outputs.ptr())) + k.sampled_in_flight;
      ++k.sampled_in_flight;
    }
    flight.entries.push_back({slot, tokens, sample_index, k.serial});
    flight.features.add(start, tokens, tokens == 1 && start >= k.state.num_prompt_tokens);
  }

  bool show(Known& k) {
    k.round = round_;
    k.place = static_cast<std::int32_t>(shot_.requests.size());
    k.state.num_output_tokens = narrow(PyList_GET_SIZE(k.outputs.ptr()));
    k.state.num_sampled_tokens = k.state.num_output_tokens + k.sampled_in_flight;
    k.detail.sequence = static_cast<std::uint32_t>(k.place);
    shot_.requests.push_back(k.state);
    shot_.details.push_back(k.detail);
    return shot_.requests.size() < writer_.capacity();
  }

  void read_running(const nb::list& running) {
    const auto count = std::min(static_cast<Py_ssize_t>(writer_.capacity()), PyList_GET_SIZE(running.ptr()));
    running_slots_.resize(static_cast<std::size_t>(count), -1);
    for (Py_ssize_t i = 0; i < count; ++i) {
      std::int32_t& slot = running_slots_[static_cast<std::size_t>(i)];  // as it was: mostly it still is
      PyObject* const request = PyList_GET_ITEM(running.ptr(), i);
      if (slot < 0 || known_[static_cast<std::size_t>(slot)].request.ptr() != request) {
        const auto found = by_request_.find(request);
        if (found == by_request_.end()) throw std::runtime_error("a request runs that nobody has added");
        slot = found->second;
      }
      Known& k = known_[static_cast<std::size_t>(slot)];
      k.state.status = Status::running;
      if (k.detail.num_preemptions > 0) {
        k.state.num_stale_tokens = count_of(k.request, names_.num_stale_output_tokens);
        k.state.num_output_placeholders =
            static_cast<std::int8_t>(count_of(k.request, names_.num_output_placeholders));
      } else if (config_.async_scheduling) {
        k.state.num_output_placeholders = static_cast<std::int8_t>(k.sampled_in_flight);
      }
      k.state.num_blocks = narrow(config_.blocks_for(k.state.num_computed_tokens));
      show(k);
    }
    shot_.num_running = count;
  }

  void read_waiting(nb::handle waiting) {
    if (shot_.requests.size() >= writer_.capacity()) return;
    if (config_.policy == Policy::priority) {
      read_waiting_by_priority();
      return;
    }
    for_each_while(waiting, [&](const nb::object& request) {
      const auto found = by_request_.find(request.ptr());
      return found == by_request_.end() || show_waiting(known_[static_cast<std::size_t>(found->second)]);
    });
  }

  void read_waiting_by_priority() {
    by_key_.clear();
    for (std::size_t slot = 0; slot < known_.size(); ++slot) {
      const Known& k = known_[slot];
      if (k.request.is_valid() && k.round != round_) by_key_.push_back(static_cast<std::int32_t>(slot));
    }
    const auto before = [&](std::int32_t a, std::int32_t b) {
      const Known& x = known_[static_cast<std::size_t>(a)];
      const Known& y = known_[static_cast<std::size_t>(b)];
      const auto key = [](const Known& k) { return std::tuple(k.detail.priority, k.detail.arrival_time); };
      if (key(x) != key(y)) return key(x) < key(y);
      return PyUnicode_Compare(x.text.ptr(), y.text.ptr()) < 0;
    };
    std::sort(by_key_.begin(), by_key_.end(), before);
    for (const std::int32_t slot : by_key_) {
      if (!show_waiting(known_[static_cast<std::size_t>(slot)])) return;
    }
  }

  bool show_waiting(Known& k) {
    k.state.status = k.admitted ? Status::preempted : Status::waiting;
    if (k.admitted) {
      k.state.num_computed_tokens = count_of(k.request, names_.num_computed_tokens);
      k.state.num_output_placeholders = static_cast<std::int8_t>(count_of(k.request, names_.num_output_placeholders));
      k.state.num_stale_tokens = count_of(k.request, names_.num_stale_output_tokens);
      k.state.is_prefill_chunk = number_of(attribute(k.request, names_.is_prefill_chunk)) != 0;
      k.detail.num_preemptions = count_of(k.request, names_.num_preemptions);
      k.state.num_blocks = 0;
    }
    return show(k);
  }

  void tell_batches() {
    shot_.in_flight.resize(flights_.size());
    for (std::size_t i = 0; i < flights_.size(); ++i) {
      const Flight& flight = flights_[i];
      Snapshot::BatchInFlight& batch = shot_.in_flight[i];
      batch.start = flight.start;
      batch.features = flight.features;
      batch.num_lockstep = 0;
      batch.entries.clear();
      for (const Entry& e : flight.entries) {
        const Known& k = known_[static_cast<std::size_t>(e.slot)];
        if (k.serial == e.serial && k.round == round_) batch.entries.push_back({k.place, e.tokens, e.sample_index});
      }
    }
  }

  SnapshotWriter& writer_;
  SchedulerConfig config_;
  Names names_;
  std::vector<Known> known_;
  std::vector<std::int32_t> free_slots_, by_key_, running_slots_;
  nb::dict by_text_;  // id: slot
  std::unordered_map<PyObject*, std::int32_t> by_request_;
  std::deque<Flight> flights_;
  Snapshot shot_;
  std::uint64_t serials_ = 0, round_ = 0;
  std::int64_t prompt_tokens_ = 0;  // of all known
};

}  // namespace

void bind_watch(nb::module_& m) {
  nb::class_<SchedulerWatch>(m, "SchedulerWatch",
                             "Publishes the state of a Python scheduler whose requests have the attributes of vLLM's.")
      .def(nb::init<SnapshotWriter&, const SchedulerConfig&>(), nb::arg("writer"), nb::arg("config"),
           nb::keep_alive<1, 2>())
      .def("add", &SchedulerWatch::add, nb::arg("request"), nb::arg("id"), nb::arg("arrival_ns"))
      .def("begin", &SchedulerWatch::begin, nb::arg("num_scheduled_tokens"), nb::arg("preempted_ids"),
           nb::arg("now_ns"))
      .def("end", &SchedulerWatch::end, nb::arg("now_ns"))
      .def("drop", &SchedulerWatch::drop, nb::arg("ended_ids"))
      .def("keep_only", &SchedulerWatch::keep_only, nb::arg("requests"))
      .def("publish", &SchedulerWatch::publish, nb::arg("running"), nb::arg("waiting"), nb::arg("num_waiting"),
           nb::arg("num_free_blocks"), nb::arg("waiting_for_batch"), nb::arg("unflushed_ends"),
           nb::arg("capacity_bound"), nb::arg("num_executed"), nb::arg("last_prefill"), nb::arg("now_ns"))
      .def_prop_ro("num_in_flight", &SchedulerWatch::num_in_flight)
      .def_prop_ro("num_known", &SchedulerWatch::num_known);
}
