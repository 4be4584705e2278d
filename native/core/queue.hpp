// A vector that also takes and gives items at its front.
#pragma once

#include <cstddef>
#include <utility>

#include "page_allocator.hpp"

namespace simcluster {

template <typename Item>
class Queue {
 public:
  using value_type = Item;
  using const_iterator = typename GrowingVector<Item>::const_iterator;

  bool empty() const { return size_ == 0; }
  std::size_t size() const { return size_; }
  const Item& front() const { return items_[first_]; }
  const Item& back() const { return items_.back(); }
  const_iterator begin() const { return items_.begin() + static_cast<std::ptrdiff_t>(first_); }
  const_iterator end() const { return items_.end(); }

  void clear() {
    items_.clear();
    first_ = size_ = 0;
  }
  void push_back(const Item& item) {
    if (items_.size() == items_.capacity() && first_ > items_.size() / 2) drop_room();
    items_.push_back(item);
    ++size_;
  }
  void pop_front() {
    ++first_;
    if (--size_ == 0) clear();
  }
  void push_front(const Item& item) {
    if (first_ == 0) {
      first_ = size() + 1;  // room for as many again, so that a row of calls is cheap
      items_.insert(items_.begin(), first_, Item{});
    }
    items_[--first_] = item;
    ++size_;
  }
  void insert(const_iterator place, const Item& item) {
    items_.insert(place, item);
    ++size_;
  }
  void erase(const_iterator place) {
    items_.erase(place);
    if (--size_ == 0) clear();
  }

 private:
  void drop_room() {
    items_.erase(items_.begin(), begin());
    first_ = 0;
  }

  GrowingVector<Item> items_;
  std::size_t first_ = 0, size_ = 0;  // the size is asked for more often than anything changes
};

}  // namespace simcluster
