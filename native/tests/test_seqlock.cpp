// The ring within one process, where a race detector sees both sides.
#include <atomic>
#include <thread>
#include <vector>

#include "channel_words.hpp"
#include "check.hpp"
#include "seqlock.hpp"

using namespace simcluster;
using namespace simcluster::testing;

namespace {

constexpr std::size_t kCapacity = 64;

struct Memory {
  explicit Memory(std::size_t num_slots)
      : words(SeqlockRing::words(num_slots, kCapacity)), ring{&newest, words.data(), num_slots, kCapacity} {}

  SharedWord newest{0};
  std::vector<SharedWord> words;
  SeqlockRing ring;
};

void the_newest_complete_record_is_read() {
  Memory memory(3);
  std::vector<std::uint64_t> record;
  CHECK(read_record(memory.ring, record) == 0);
  for (std::uint64_t n = 1; n <= 10; ++n) {
    write_record(memory.ring, n, words_of_record(n, kCapacity));
    CHECK(read_record(memory.ring, record) == n);
    CHECK(record == words_of_record(n, kCapacity));
  }
}

void a_record_that_its_writer_did_not_finish_is_never_read() {
  Memory memory(3);
  write_record(memory.ring, 1, words_of_record(1, kCapacity));
  memory.ring.slot(2)[0].store(3);  // the writer dies in the second
  memory.ring.slot(2)[2].store(99);
  std::vector<std::uint64_t> record;
  CHECK(read_record(memory.ring, record) == 1);
  CHECK(record == words_of_record(1, kCapacity));
  Memory single(1);
  write_record(single.ring, 1, words_of_record(1, kCapacity));
  single.ring.slot(2)[0].store(3);
  CHECK(read_record(single.ring, record) == 0);  // there is nothing else, and nobody waits for it
}

void a_record_beyond_the_capacity_is_cut() {
  Memory memory(2);
  const std::vector<std::uint64_t> longer(kCapacity + 5, 7);
  write_record(memory.ring, 1, longer);
  std::vector<std::uint64_t> record;
  CHECK(read_record(memory.ring, record) == 1);
  CHECK(record.size() == kCapacity);
  memory.ring.slot(1)[1].store(kCapacity + 1);  // a length that no writer stores
  CHECK(read_record(memory.ring, record) == 0);
}

void a_thread_that_reads_what_another_writes_sees_whole_records_in_order() {
  constexpr std::uint64_t kRecords = 20'000;
  for (const std::size_t num_slots : {1, 2, 4}) {
    Memory memory(num_slots);
    std::thread writer([&] {
      for (std::uint64_t n = 1; n <= kRecords; ++n) write_record(memory.ring, n, words_of_record(n, kCapacity));
    });
    std::vector<std::uint64_t> record;
    std::uint64_t last = 0, read = 0;
    while (last < kRecords) {
      const std::uint64_t number = read_record(memory.ring, record);
      if (number == 0) continue;
      CHECK(number >= last);
      CHECK(record == words_of_record(number, kCapacity));
      read += number > last ? 1 : 0;
      last = number;
    }
    writer.join();
    CHECK(read > 0);
  }
}

}  // namespace

int main() {
  the_newest_complete_record_is_read();
  a_record_that_its_writer_did_not_finish_is_never_read();
  a_record_beyond_the_capacity_is_cut();
  a_thread_that_reads_what_another_writes_sees_whole_records_in_order();
  return report("seqlock");
}
