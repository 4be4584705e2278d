// What a view does with a published snapshot: most of them are replaced before anybody asks about their requests.
#include <memory>
#include <utility>

#include "prefetch.hpp"
#include "view.hpp"

namespace simcluster {

void InstanceView::refresh_later(PublishedSnapshot published, std::uint64_t change) {
  static thread_local Snapshot scratch;
  Snapshot& head = *in_register(&scratch);
  if (!published.take_head(head)) return;
  // Whoever is in the one before may have ended by now, and would be expected for ever.
  if (source_ != nullptr || !unseen_.empty()) look();
  source_ = nullptr;
  published_ = std::move(published);
  change_ = change;
  believed_until_ = believed_until(head);
  has_ending_ = ready_ = foreseen_ = false;
  set_bound(head.device_free(believed(), config_.async_scheduling));
  tell();
}

void InstanceView::read_published() {
  // One for all views, so that it is in the cache: what another one has just replaced.
  static thread_local std::shared_ptr<Snapshot> replaced;
  std::shared_ptr<Snapshot>& spare = *in_register(&replaced);
  if (spare == nullptr || spare.use_count() > 1) spare = std::make_shared<Snapshot>();
  const PublishedSnapshot published = std::exchange(published_, {});
  if (!published.take(*spare)) return;
  own_.swap(spare);
  snapshot_ = own_;
  match_requests();
}

}  // namespace simcluster
