// Counts the events of a stream while its bytes pass by, without taking every event apart.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

namespace simcluster {

class EventCounter {
 public:
  static constexpr std::size_t kTail = 2048;  // bytes kept of the end, where the usage is

  std::int64_t events = 0;  // whoever knows better may set it

  // Counts the ends of events in bytes that pass by; an end may be cut in two.
  void feed(std::string_view piece) {
    constexpr std::string_view kEnd = "\n\n";
    for (std::size_t at = piece.find(kEnd); at != piece.npos; at = piece.find(kEnd, at + 2)) ++events;
    if (last_ == '\n' && piece.starts_with('\n') && !piece.starts_with(kEnd)) ++events;
    keep(piece);
  }

  // Keeps the end of bytes whose events are counted elsewhere.
  void keep(std::string_view piece) {
    if (piece.empty()) return;
    last_ = piece.back();
    piece.remove_prefix(piece.size() - std::min(piece.size(), kTail));
    if (tail_.size() + piece.size() > 2 * kTail) tail_.erase(0, tail_.size() - std::min(tail_.size(), kTail));
    tail_.append(piece);
  }

  std::string_view tail() const {
    const std::string_view all = tail_;
    return all.substr(all.size() - std::min(all.size(), kTail));
  }

 private:
  char last_ = '\0';
  std::string tail_;
};

}  // namespace simcluster
