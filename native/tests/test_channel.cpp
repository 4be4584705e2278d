// Snapshots through shared memory: what comes out, what is left out, and what a reader learns of its writer.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>

#include "check.hpp"
#include "helpers.hpp"
#include "snapshot_channel.hpp"
#include "view.hpp"

using namespace simcluster;
using namespace simcluster::testing;

namespace {

constexpr std::int64_t kOrigin = 5'000'000'000;  // ns

std::string fresh_name() {
  static int count = 0;
  return "test." + std::to_string(getpid()) + "." + std::to_string(++count);
}

Engine busy(bool async, std::int64_t usable_blocks = 40) {
  SchedulerConfig config = plain(async, usable_blocks);
  config.max_num_seqs = 5;
  config.max_num_batched_tokens = 12;
  Engine engine(config, u_step(), {}, EngineOptions{true, true});
  for (std::int64_t i = 0; i < 9; ++i) engine.submit(ask(i, i * 9 * kMs, 3 + 5 * (i % 4), 4 + i));
  return engine;
}

// As it is published: ends that nobody needs any more are not told of.
Snapshot as_published(const Engine& engine) {
  Snapshot shot = Snapshot::capture(engine);
  shot.intake = -1;
  for (Snapshot::BatchInFlight& batch : shot.in_flight) {
    std::erase_if(batch.entries, [](const Snapshot::Entry& e) { return e.request < 0; });
  }
  for (std::size_t i = 0; i < shot.details.size(); ++i) {
    shot.details[i].sequence = static_cast<std::uint32_t>(i);
    shot.requests[i].next_running = shot.requests[i].prev_running = -1;  // restoring links them anew
  }
  return shot;
}

void a_snapshot_comes_out_as_it_went_in() {
  std::int64_t preempted = 0, in_flight = 0;
  for (const bool async : {false, true}) {
    Engine engine = busy(async, 12);
    const std::string name = fresh_name();
    SnapshotWriter writer(name, 9, engine.scheduler().config());
    SnapshotReader reader(name, kOrigin);
    for (Picoseconds t = 0; t < 900 * kMs; t += 7 * kMs) {
      engine.advance_to(t);
      const std::int64_t now = kOrigin + t / 1000;
      writer.publish(engine, {kOrigin}, now);
      CHECK(reader.poll(now));
      const Snapshot& out = *reader.snapshot();
      const Snapshot in = as_published(engine);
      CHECK(out.requests == in.requests);
      CHECK(out.details == in.details);
      CHECK(out.in_flight == in.in_flight);
      CHECK(out.taken_at == in.taken_at && out.boundary == in.boundary && out.intake == -1);
      CHECK(out.num_running == in.num_running && out.num_free_blocks == in.num_free_blocks);
      CHECK(out.waiting_for_batch == in.waiting_for_batch && out.unflushed_ends == in.unflushed_ends);
      CHECK(out.left_out == Snapshot::LeftOut{});
      for (const RequestState& r : out.requests) preempted += r.status == Status::preempted ? 1 : 0;
      in_flight += static_cast<std::int64_t>(out.in_flight.size());
    }
    CHECK(reader.config().max_num_seqs == 5 && reader.config().async_scheduling == async);
  }
  CHECK(preempted > 0 && in_flight > 100);
}

void what_finds_no_room_is_counted() {
  Engine engine = busy(true);
  engine.advance_to(90 * kMs);
  const Snapshot all = Snapshot::capture(engine);
  const auto resident = static_cast<std::int64_t>(all.requests.size());
  CHECK(all.num_running == 5 && resident > 7);
  for (std::int64_t room = 1; room <= resident + 1; ++room) {
    const std::string name = fresh_name();
    SnapshotWriter writer(name, static_cast<std::size_t>(room), engine.scheduler().config());
    SnapshotReader reader(name, 0);
    writer.publish(engine, {}, 1);
    reader.poll(1);
    const Snapshot& shot = *reader.snapshot();
    CHECK(static_cast<std::int64_t>(shot.requests.size()) == std::min(room, resident));
    CHECK(shot.num_running == std::min<std::int64_t>(room, 5));
    CHECK(shot.left_out.num_running == 5 - shot.num_running);
    InstanceView whole(engine.scheduler().config(), u_step(), 10, true);
    whole.refresh(std::make_shared<const Snapshot>(all));
    InstanceView view(reader.config(), u_step(), 10, true);
    view.refresh(reader.snapshot());
    CHECK(view.num_running() == whole.num_running() && view.num_waiting() == whole.num_waiting());
    CHECK(view.prefill_tokens_left() == whole.prefill_tokens_left());
    CHECK(view.estimate_first_token({99, 10, 4, -1, false, 0, 0, 300 * kMs}) < kNever);  // a part can be continued
  }
}

void requests_are_told_apart_by_their_ids() {
  const std::string name = fresh_name();
  Engine engine = busy(false);
  SnapshotWriter writer(name, 20, engine.scheduler().config());
  SnapshotReader reader(name, 0);
  InstanceView view(engine.scheduler().config(), u_step(), 10, true);
  view.record_dispatch({3, 18, 7, -1, false, 0, 0, 27 * kMs});
  view.record_dispatch({77, 18, 7, -1, false, 0, 0, 28 * kMs});
  engine.advance_to(40 * kMs);
  writer.publish(engine, {}, 40'000'000);
  reader.poll(40'000'000);
  view.refresh(reader.snapshot());
  CHECK(view.num_dispatched_since() == 1);  // 3 is there, 77 on its way although its time has come
  CHECK(view.num_resident() == static_cast<std::int64_t>(reader.snapshot()->requests.size()) + 1);
  CHECK(view.estimate_first_token({99, 10, 4, -1, false, 0, 0, 50 * kMs}) < kNever);
  view.forget_dispatch(77);
  CHECK(view.num_dispatched_since() == 0);
  view.forget_dispatch(77);
}

void a_step_that_runs_late_is_not_over_yet() {
  const std::string name = fresh_name();
  Engine engine = busy(false);
  SnapshotWriter writer(name, 20, engine.scheduler().config());
  SnapshotReader reader(name, 0);
  engine.advance_to(15 * kMs);
  writer.publish(engine, {}, 15'000'000);
  for (const std::int64_t now : {16'000'000, 17'000'000, 500'000'000}) {
    CHECK(reader.poll(now) == (now == 16'000'000));
    CHECK(reader.snapshot()->taken_at == now * 1000 && reader.age_ns() == now - 15'000'000);
  }
  const auto same = reader.snapshot();
  CHECK(reader.snapshot() == same);
}

void a_reader_learns_what_becomes_of_its_writer() {
  const std::string name = fresh_name();
  SnapshotReader reader(name, 0);
  std::int64_t now = monotonic_ns();
  const auto poll = [&] { return reader.poll(now += 11'000'000); };
  CHECK(!poll() && reader.state() == SourceState::missing && reader.snapshot() == nullptr);
  CHECK(throws<std::runtime_error>([&] { reader.config(); }));
  const pid_t child = fork();
  if (child == 0) {
    Engine engine = busy(true);
    engine.advance_to(90 * kMs);
    SnapshotWriter writer(name, 20, engine.scheduler().config());
    writer.publish(engine, {}, 1);
    _exit(0);  // without a word
  }
  waitpid(child, nullptr, 0);
  CHECK(poll() && reader.state() == SourceState::dead);
  CHECK(reader.snapshot() != nullptr && reader.config().num_gpu_blocks == 41);
  CHECK(reader.channel().writer_pid() == child && reader.channel().generation() == 1);
  CHECK(!poll() && reader.snapshot()->num_running == 5);  // the last good one stays
  {
    Engine engine = busy(true, 70);  // started again with other options
    SnapshotWriter writer(name, 3, engine.scheduler().config());
    CHECK(throws<std::runtime_error>([&] { SnapshotWriter(name, 3, engine.scheduler().config()); }));
    CHECK(poll() && reader.state() == SourceState::live && reader.channel().generation() == 2);
    CHECK(reader.snapshot() == nullptr && reader.config().num_gpu_blocks == 71);
    writer.publish(engine, {}, 1);
    CHECK(poll() && reader.snapshot()->num_running == 0);
    CHECK(!poll() && reader.state() == SourceState::live);
  }
  CHECK(!poll() && reader.state() == SourceState::closed && reader.snapshot() != nullptr);
  SnapshotReader late(name, 0);
  late.poll(now);
  CHECK(late.state() == SourceState::missing);  // the name went with it
}

void another_layout_and_another_name_are_refused() {
  const std::string name = fresh_name();
  ShmWriter other(name, {12345, 2, 8, {}});
  SnapshotReader reader(name, 0);
  reader.poll(1);
  CHECK(reader.state() == SourceState::missing);
  for (const char* bad : {"", "a/b", "a b", "\xc3\xa4"}) {
    CHECK(throws<std::invalid_argument>([&] { SnapshotReader(bad, 0); }));
    CHECK(throws<std::invalid_argument>([&] { ShmWriter(bad, {1, 1, 1, {}}); }));
  }
  CHECK(throws<std::invalid_argument>([&] { SnapshotReader(std::string(101, 'a'), 0); }));
  CHECK(throws<std::invalid_argument>([&] { ShmWriter(fresh_name(), {1, 0, 1, {}}); }));
}

}  // namespace

int main() {
  a_snapshot_comes_out_as_it_went_in();
  what_finds_no_room_is_counted();
  requests_are_told_apart_by_their_ids();
  a_step_that_runs_late_is_not_over_yet();
  a_reader_learns_what_becomes_of_its_writer();
  another_layout_and_another_name_are_refused();
  return report("channel");
}
