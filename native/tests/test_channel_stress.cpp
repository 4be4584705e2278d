// Writers at full speed in processes of their own, killed at random; no reader may ever see a mixture of two records.
// SIMCLUSTER_STRESS_SECONDS sets how long (default 3). Readers that skip the check must see mixtures: the control.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <random>
#include <string>

#include "channel_words.hpp"
#include "check.hpp"
#include "shm_channel.hpp"

using namespace simcluster;
using namespace simcluster::testing;

namespace {

constexpr std::uint64_t kVersion = 7;
constexpr std::int64_t kMs = 1'000'000;
constexpr std::int64_t kPatience = 60'000 * kMs;

struct Counts {
  std::uint64_t records = 0, torn = 0, kills = 0, killed_in_a_record = 0, not_noticed = 0, misses = 0;
};

bool is_whole(const std::vector<std::uint64_t>& record, std::uint64_t number, std::size_t capacity) {
  if (record.size() != 1 + number % capacity) return false;
  for (std::size_t i = 0; i < record.size(); ++i) {
    if (record[i] != word_of(number, i)) return false;
  }
  return true;
}

// In a child: writes until it is killed.
[[noreturn]] void write_for_ever(const std::string& name, std::size_t num_slots, std::size_t capacity) {
  ShmWriter writer(name, {kVersion, num_slots, capacity, {capacity}});
  std::vector<std::uint64_t> record;
  for (std::uint64_t n = 1;; ++n) {
    record.resize(1 + n % capacity);
    for (std::size_t i = 0; i < record.size(); ++i) record[i] = word_of(n, i);
    writer.write(record);
  }
}

// What a reader would do that trusts the newest number.
bool unchecked_copy_is_whole(const SeqlockRing& ring, std::vector<std::uint64_t>& record) {
  const std::uint64_t number = ring.newest->load();
  if (number == 0) return true;
  const SharedWord* const slot = ring.slot(number);
  record.resize(1 + number % ring.capacity);
  for (std::size_t i = 0; i < record.size(); ++i) record[i] = slot[SeqlockRing::kOverhead + i].load();
  return is_whole(record, number, ring.capacity);
}

bool one_slot_is_in_progress(const SeqlockRing& ring) {
  for (std::uint64_t i = 0; i < ring.num_slots; ++i) {
    if (ring.slot(i)[0].load() % 2 == 1) return true;
  }
  return false;
}

// Reads one writer's records until `until`, then kills it.
void one_life(ShmReader& reader, pid_t writer, std::int64_t until, bool checked, Counts& counts) {
  std::vector<std::uint64_t> scratch;
  std::uint64_t last = 0;
  while (monotonic_ns() < until) {
    if (!checked) {
      ++counts.records;
      counts.torn += unchecked_copy_is_whole(reader.ring(), scratch) ? 0 : 1;
    } else if (reader.poll(monotonic_ns()) && reader.number() > 0) {
      ++counts.records;
      const bool whole = is_whole(reader.record(), reader.number(), reader.attributes().front());
      counts.torn += !whole || reader.number() < last ? 1 : 0;
      last = reader.number();
    }
  }
  kill(writer, SIGKILL);
  waitpid(writer, nullptr, 0);
  ++counts.kills;
  const std::int64_t deadline = monotonic_ns() + 1000 * kMs;  // it should take 10
  while (reader.state() == SourceState::live && monotonic_ns() < deadline) reader.poll(monotonic_ns());
  if (reader.state() == SourceState::live) ++counts.not_noticed;
  if (reader.number() == 0) return;
  counts.killed_in_a_record += one_slot_is_in_progress(reader.ring()) ? 1 : 0;
  if (checked && !is_whole(reader.record(), reader.number(), reader.attributes().front())) ++counts.torn;
}

// Longer on a busy machine, where a reader may not see two records in all that time.
bool has_seen_enough(const Counts& counts, bool checked) {
  return checked ? counts.records > 20 && counts.killed_in_a_record > 0 : counts.torn > 0;
}

Counts run(const std::string& name, std::size_t num_slots, bool checked, std::int64_t duration_ns, std::uint64_t seed) {
  Counts counts;
  std::mt19937_64 random(seed);
  ShmReader reader(name, kVersion);
  const std::int64_t start = monotonic_ns();
  const auto elapsed = [&] { return monotonic_ns() - start; };
  while (elapsed() < duration_ns || (!has_seen_enough(counts, checked) && elapsed() < kPatience)) {
    const std::size_t capacity = 1 + random() % 2000;  // every writer has another size
    const auto life = static_cast<std::int64_t>(random() % 40) * kMs;
    const std::uint64_t generation = reader.generation();
    const pid_t writer = fork();
    if (writer == 0) write_for_ever(name, num_slots, capacity);
    const std::int64_t patience = monotonic_ns() + kPatience;
    while (reader.generation() == generation && monotonic_ns() < patience) reader.poll(monotonic_ns());
    CHECK(reader.generation() == generation + 1);
    CHECK(reader.attributes() == std::vector<std::uint64_t>{capacity});
    one_life(reader, writer, monotonic_ns() + life, checked, counts);
  }
  counts.misses = reader.num_misses();
  ShmWriter last(name, {kVersion, 1, 1, {}});  // takes the name away
  return counts;
}

void tell(const char* what, std::size_t num_slots, const Counts& c) {
  std::printf("%s, %zu slots: %llu records, %llu torn, %llu writers killed, %llu of them within a record, %llu misses\n",
              what, num_slots, static_cast<unsigned long long>(c.records), static_cast<unsigned long long>(c.torn),
              static_cast<unsigned long long>(c.kills), static_cast<unsigned long long>(c.killed_in_a_record),
              static_cast<unsigned long long>(c.misses));
}

}  // namespace

int main() {
  const char* const text = std::getenv("SIMCLUSTER_STRESS_SECONDS");
  const double seconds = text != nullptr ? std::atof(text) : 3.0;
  const std::string name = "stress." + std::to_string(getpid());
  const auto share = [&](double part) { return static_cast<std::int64_t>(part * seconds * 1000) * kMs; };
  for (const std::size_t num_slots : {std::size_t{4}, std::size_t{1}}) {
    const Counts counts = run(name, num_slots, true, share(num_slots == 4 ? 0.6 : 0.25), num_slots);
    tell("checked", num_slots, counts);
    CHECK(counts.torn == 0);
    CHECK(counts.not_noticed == 0);
    CHECK(has_seen_enough(counts, true));
  }
  const Counts control = run(name, 1, false, share(0.15), 3);
  tell("unchecked", 1, control);
  CHECK(control.torn > 0);  // else the test above could not have seen anything
  return report("channel_stress");
}
