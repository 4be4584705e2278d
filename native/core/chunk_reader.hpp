// Takes the framing off a body in chunks (RFC 9112, section 7.1), however its bytes are cut.
#pragma once

#include <cstdint>
#include <string_view>

namespace simcluster {

class ChunkReader {
 public:
  // Copies the content of some bytes to `out`, which has room for as many, and returns how much that was. Takes nothing
  // behind the body's end.
  std::size_t read(std::string_view bytes, char* out);

  bool ended() const { return state_ == State::ended; }
  bool broken() const { return state_ == State::broken; }  // this is no such body
  std::size_t num_left() const { return left_over_; }      // bytes of the last read() that came behind the end

 private:
  enum class State : std::uint8_t {
    size,         // hexadecimal digits, none yet
    more_size,    // after the first one
    extension,    // up to the line's end
    size_end,     // its line feed
    data,         // of a chunk
    data_return,  // behind them
    data_feed,
    trailer,       // the beginning of a line behind the last chunk
    trailer_line,  // the rest of it
    last_feed,     // of the empty line
    ended,
    broken,
  };

  void take(char c);

  State state_ = State::size;
  std::uint64_t size_ = 0;  // bytes of the chunk that are to come
  std::size_t line_ = 0;    // bytes that say nothing: extensions and trailers
  std::size_t left_over_ = 0;
};

}  // namespace simcluster
