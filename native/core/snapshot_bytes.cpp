// The words of a snapshot in a frame that shows what is not as it was.
#include "snapshot_bytes.hpp"

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "hash.hpp"
#include "snapshot_words.hpp"

namespace simcluster {
namespace {

constexpr std::uint64_t kMagic = 0x736e617073207363;  // "cs snaps" where bytes of a word come lowest first
constexpr std::size_t kFrameWords = 3;                // magic, format and checksum

// Whether the sums are those of the requests, so that whoever uses them finds every request among them.
bool adds_up(const Snapshot& s) {
  const auto size = std::ssize(s.in_step.by_phase);
  if (s.in_step.count < 0) return true;
  if (size < 1) return s.in_step.count == 0 && s.in_step.context == 0;
  const std::int64_t ahead = std::ssize(s.in_flight);
  std::int64_t count = 0, context = 0;
  std::vector<std::int32_t> by_phase(static_cast<std::size_t>(size), 0);
  for (std::int64_t i = 0; i < s.num_running; ++i) {
    const RequestState& r = s.requests[static_cast<std::size_t>(i)];
    const std::int64_t joined = std::max(static_cast<std::int32_t>(r.join_pass), 0);
    if (!r.lockstep || std::int64_t{r.num_sampled_tokens} - r.num_output_tokens + joined != ahead) continue;
    const std::int64_t room = r.num_blocks * size - r.num_computed_tokens;
    if (room < 0 || room >= size) return false;
    ++count;
    context += r.num_computed_tokens;
    by_phase[static_cast<std::size_t>((ahead + room) % size)] += 1;
  }
  return count == s.in_step.count && context == s.in_step.context && by_phase == s.in_step.by_phase;
}

// What an engine never shows, and what would mislead those that restore it.
bool plausible(const Snapshot& s) {
  for (std::size_t i = 0; i < s.requests.size(); ++i) {
    const RequestState& r = s.requests[i];
    const bool running = static_cast<std::int64_t>(i) < s.num_running;
    const std::int32_t least = std::min({r.num_output_tokens, r.num_computed_tokens, r.num_inflight_tokens,
                                         r.num_stale_tokens, r.num_blocks, r.num_registered_tokens, r.max_tokens});
    if (least < 0 || r.num_prompt_tokens < 1 || r.num_sampled_tokens < r.num_output_tokens) return false;
    if (r.num_output_placeholders < 0 || r.num_output_placeholders > 2 || r.status == Status::gone) return false;
    if ((r.status == Status::running) != running) return false;
  }
  for (const Snapshot::BatchInFlight& batch : s.in_flight) {
    for (const Snapshot::Entry& e : batch.entries) {
      if (e.num_tokens < 1 || e.sample_index < -1) return false;
    }
  }
  return s.num_free_blocks >= 0 && adds_up(s);
}

// Another word anywhere gives another sum.
std::uint64_t checksum(std::span<const std::uint64_t> words) {
  std::uint64_t sum = 0;
  for (const std::uint64_t word : words) sum = mix64(sum ^ word);
  return sum;
}

}  // namespace

std::string to_bytes(const Snapshot& snapshot) {
  std::vector<std::uint64_t> words{kMagic, kSnapshotFormat};
  WordForm form;
  form.capacity = snapshot.requests.size();
  form.most_phases = snapshot.in_step.by_phase.size();
  form.clock.per_ns = 1;
  form.at = snapshot.taken_at;
  form.exact = true;
  put_snapshot(words, snapshot, form);
  words.push_back(checksum(words));
  std::string bytes;
  bytes.reserve(words.size() * sizeof(std::uint64_t));
  for (const std::uint64_t word : words) {
    for (int shift = 0; shift < 64; shift += 8) bytes.push_back(static_cast<char>(word >> shift & 0xff));
  }
  return bytes;
}

Snapshot from_bytes(std::string_view bytes) {
  const auto fail = [](const std::string& what) {
    throw std::invalid_argument("these bytes are no snapshot: " + what + "; pass what Snapshot.to_bytes() returned");
  };
  constexpr std::size_t kWord = sizeof(std::uint64_t);
  std::vector<std::uint64_t> words(bytes.size() / kWord, 0);
  for (std::size_t i = 0; i < words.size() * kWord; ++i) {
    words[i / kWord] |= static_cast<std::uint64_t>(static_cast<unsigned char>(bytes[i])) << (i % kWord * 8);
  }
  if (words.size() < 2 || words[0] != kMagic) fail("they do not begin as one");
  if (words[1] != kSnapshotFormat) {
    fail("layout " + std::to_string(words[1]) + ", known is " + std::to_string(kSnapshotFormat));
  }
  if (words.size() < kFrameWords || bytes.size() % kWord != 0) {
    fail("of " + std::to_string(bytes.size()) + " bytes the end is missing");
  }
  const std::span<const std::uint64_t> all(words);
  if (checksum(all.first(all.size() - 1)) != all.back()) fail("their checksum is wrong");
  Snapshot s;
  ReaderClock clock;
  clock.per_ns = 1;
  if (!take_snapshot(all.subspan(2, all.size() - kFrameWords), clock, s) || !plausible(s)) {
    fail("their parts contradict each other");
  }
  return s;
}

}  // namespace simcluster
