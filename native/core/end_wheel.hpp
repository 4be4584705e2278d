// Which requests have their last token in which pass.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace simcluster {

// A wheel of passes: those of a place are that pass and the ones whole turns later. What is asked for is the next place
// where anybody is, so nothing has to be sorted, and a request a turn or more away costs a look every turn.
class EndWheel {
 public:
  static constexpr std::int64_t kNever = std::int64_t{1} << 40;  // later than all passes

  // No request has its end in an earlier pass.
  std::int64_t next() const { return next_; }

  // A request that has none so far.
  void add(std::int64_t pass, std::int32_t slot) {
    const auto at = static_cast<std::size_t>(slot);
    if (at >= ends_.size()) grow(at + 1);
    const std::size_t place = place_of(pass);
    ends_[at] = {static_cast<std::uint32_t>(pass), heads_[place]};
    heads_[place] = slot;
    mark(place);
    next_ = std::min(next_, pass);
  }
  // Call visit(slot) for those whose end is in pass next(), and forget them.
  template <typename Visit>
  void take(const Visit& visit) {
    const std::size_t place = place_of(next_);
    const auto pass = static_cast<std::uint32_t>(next_);
    std::int32_t later = kNobody;  // a turn or more
    for (std::int32_t slot = heads_[place]; slot >= 0;) {
      End& end = ends_[static_cast<std::size_t>(slot)];
      const std::int32_t after = end.after;
      if (end.pass == pass) {
        visit(slot);
      } else {
        end.after = later;
        later = slot;
      }
      slot = after;
    }
    heads_[place] = later;
    if (later < 0) unmark(place);
    next_ = search(next_ + 1);
  }
  // False: it has none.
  bool remove(std::int32_t slot);
  void clear();

 private:
  struct End {
    std::uint32_t pass = 0;  // its low bits, since none is 2^32 passes away
    std::int32_t after = -1;
  };
  static constexpr std::int32_t kNobody = -1;
  static constexpr std::size_t kWord = 64, kWords = 16, kPlaces = kWords * kWord;

  static std::size_t place_of(std::int64_t pass) { return static_cast<std::size_t>(pass) % kPlaces; }
  void mark(std::size_t place) {
    taken_[place / kWord] |= std::uint64_t{1} << (place % kWord);
    words_ |= 1U << (place / kWord);
  }
  void unmark(std::size_t place) {
    taken_[place / kWord] &= ~(std::uint64_t{1} << (place % kWord));
    if (taken_[place / kWord] == 0) words_ &= ~(1U << (place / kWord));
  }
  // The first pass from here on whose place is taken.
  std::int64_t search(std::int64_t pass) const {
    if (words_ == 0) return kNever;
    const std::size_t place = place_of(pass), word = place / kWord;
    const std::uint64_t here = taken_[word] >> (place % kWord);
    if (here != 0) return pass + std::countr_zero(here);
    const std::uint32_t behind = words_ >> word >> 1;
    const auto found = static_cast<std::size_t>(behind != 0 ? std::countr_zero(behind) + static_cast<int>(word) + 1
                                                            : std::countr_zero(words_));
    const std::size_t there = found * kWord + static_cast<std::size_t>(std::countr_zero(taken_[found]));
    return pass + static_cast<std::int64_t>((there - place) % kPlaces);
  }
  void grow(std::size_t size);

  std::int64_t next_ = kNever;
  std::uint32_t words_ = 0;                     // which words of taken_ are not 0
  std::array<std::uint64_t, kWords> taken_{};   // which places are
  std::vector<std::int32_t> heads_;             // (kPlaces,) a request of each place, kNobody where there is none
  std::vector<End> ends_;                       // by slot
};

}  // namespace simcluster
