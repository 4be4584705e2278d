#include "end_wheel.hpp"

namespace simcluster {

bool EndWheel::remove(std::int32_t slot) {
  const auto at = static_cast<std::size_t>(slot);
  if (at >= ends_.size()) return false;
  const std::size_t place = place_of(ends_[at].pass);
  for (std::int32_t* link = &heads_[place]; *link >= 0; link = &ends_[static_cast<std::size_t>(*link)].after) {
    if (*link != slot) continue;
    *link = ends_[at].after;
    if (heads_[place] < 0) unmark(place);
    return true;
  }
  return false;
}

void EndWheel::clear() {
  next_ = kNever;
  words_ = 0;
  taken_.fill(0);
  heads_.assign(kPlaces, kNobody);
}

void EndWheel::grow(std::size_t size) { ends_.resize(std::max(size, 2 * ends_.size())); }

}  // namespace simcluster
