#include "chunk_reader.hpp"

#include <algorithm>
#include <cstring>

namespace simcluster {
namespace {

constexpr std::uint64_t kLargest = std::uint64_t{1} << 40;  // bytes of a chunk
constexpr std::size_t kMostSilent = 16'384;                 // bytes of extensions and trailers

int digit_of(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

}  // namespace

std::size_t ChunkReader::read(std::string_view bytes, char* out) {
  std::size_t at = 0, written = 0;
  while (at < bytes.size() && state_ != State::ended && state_ != State::broken) {
    if (state_ != State::data) {
      take(bytes[at++]);
      continue;
    }
    const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(size_, bytes.size() - at));
    std::memcpy(out + written, bytes.data() + at, count);
    written += count;
    at += count;
    size_ -= count;
    if (size_ == 0) state_ = State::data_return;
  }
  left_over_ = bytes.size() - at;
  return written;
}

void ChunkReader::take(char c) {
  const auto after = [&](char wanted, State next) { state_ = c == wanted ? next : State::broken; };
  const auto silent = [&] {
    if (++line_ > kMostSilent || c == '\n') state_ = State::broken;
  };
  switch (state_) {
    case State::size:
    case State::more_size:
      if (const int digit = digit_of(c); digit >= 0) {
        size_ = size_ * 16 + static_cast<std::uint64_t>(digit);
        state_ = size_ > kLargest ? State::broken : State::more_size;
      } else if (state_ == State::more_size && c == '\r') {
        state_ = State::size_end;
      } else if (state_ == State::more_size && (c == ';' || c == ' ' || c == '\t')) {
        state_ = State::extension;
      } else {
        state_ = State::broken;
      }
      break;
    case State::extension:
      if (c == '\r') {
        state_ = State::size_end;
      } else {
        silent();
      }
      break;
    case State::size_end:
      after('\n', size_ > 0 ? State::data : State::trailer);
      break;
    case State::data_return:
      after('\r', State::data_feed);
      break;
    case State::data_feed:
      after('\n', State::size);
      break;
    case State::trailer:
      if (c == '\r') {
        state_ = State::last_feed;
      } else {
        state_ = State::trailer_line;
        silent();
      }
      break;
    case State::trailer_line:
      if (c == '\n') {
        state_ = State::trailer;
      } else {
        silent();
      }
      break;
    case State::last_feed:
      after('\n', State::ended);
      break;
    case State::data:
    case State::ended:
    case State::broken:
      break;
  }
}

}  // namespace simcluster
