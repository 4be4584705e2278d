// Paged KV cache of one instance: exact blocks, or plain counts where block identity cannot matter.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "config.hpp"
#include "request_state.hpp"

namespace simcluster {

// The pool of blocks in vLLM's free-list order, with the map from block hash to block.
// Source: VLLM_SCHEDULER.md 3.1, 3.4, 3.5.
class BlockPool {
 public:
  explicit BlockPool(std::int64_t num_blocks);

  std::int64_t num_free() const { return num_free_; }
  bool idle(std::int32_t block) const { return refs_[static_cast<std::size_t>(block)] == 0; }
  // Block registered first under this hash and still present; 0 if none (block 0 is the null block).
  std::int32_t find(std::uint64_t hash) const;

  std::int32_t take();                                       // head of the free list, its hash forgotten
  void touch(std::int32_t block);                            // one more user of a cached block
  void register_hash(std::int32_t block, std::uint64_t hash);
  void release(const std::vector<std::int32_t>& table);      // from tail to head

 private:
  void unlink(std::int32_t block);
  void link_after(std::int32_t position, std::int32_t block);
  void forget_hash(std::int32_t block);

  std::int64_t num_free_ = 0;
  // Doubly linked ring through the null block: next_[0] is the head, prev_[0] the tail.
  std::vector<std::int32_t> next_, prev_, refs_;
  std::vector<std::uint64_t> hashes_;                   // 0: none
  std::vector<std::int32_t> next_same_hash_;            // later registrations of the same hash; 0 ends
  std::unordered_map<std::uint64_t, std::int32_t> first_of_hash_;
};

// The same free list by counts, for prompts that share nothing: a cached block can then only serve the preempted
// request that left it, so the list is a row of such stretches with blocks nobody will ask for between them.
class CountedPool {
 public:
  explicit CountedPool(std::int64_t num_blocks) : num_free_(num_blocks) {}

  std::int64_t num_free() const { return num_free_; }
  bool keeps_nothing() const { return stretches_.empty(); }  // no preempted request left blocks that are still there
  void set_num_free(std::int64_t count) {
    num_free_ = count;
    stretches_.clear();
  }
  void take(std::int64_t count) {
    num_free_ -= count;
    if (!stretches_.empty()) evict(count);
  }
  // Blocks without a hash go to the front of the list, those with one to its end.
  void release(std::int64_t unhashed, std::int64_t hashed) {
    num_free_ += unhashed + hashed;
    if (!stretches_.empty()) stretches_.front().dead_before += unhashed;
  }
  void release_preempted(std::int32_t slot, std::int64_t unhashed, std::int64_t hashed);
  std::int64_t kept(std::int32_t slot) const;  // blocks of a preempted request that nobody took
  void reclaim(std::int32_t slot, std::int64_t count);  // the request takes so many of them back
  void forget(std::int32_t slot);              // it has ended; they stay in the list

 private:
  struct Stretch {
    std::int32_t slot = -1;
    std::int64_t blocks = 0;
    std::int64_t dead_before = 0;  // between the stretch before (or the head of the list) and this one
  };

  void evict(std::int64_t count);
  std::vector<Stretch>::iterator find(std::int32_t slot);
  // Remove a stretch; `left` blocks in its place stay, dead.
  void merge(std::vector<Stretch>::iterator it, std::int64_t left);

  std::int64_t num_free_;
  std::vector<Stretch> stretches_;
};

// New blocks for the tokens up to `end` beside those `held`; -1 if they, or on admission under the full-prompt check
// those of all `reserve` known tokens, are not available. Source: VLLM_SCHEDULER.md 3.3.
template <typename BlocksFor>
std::int64_t fresh_blocks(const BlocksFor& blocks_for, std::int64_t end, std::int64_t held, std::int64_t reserve,
                          std::int64_t available) {
  const auto needed = [&](std::int64_t tokens) { return std::max<std::int64_t>(blocks_for(tokens) - held, 0); };
  if (end < reserve && needed(reserve) > available) return -1;
  const std::int64_t fresh = needed(end);
  return fresh <= available ? fresh : -1;
}

class KvCache {
 public:
  explicit KvCache(const SchedulerConfig& config);

  bool exact() const { return exact_; }
  std::int64_t num_free_blocks() const { return exact_ ? pool_.num_free() : counted_.num_free(); }
  std::int64_t num_free_counted() const { return counted_.num_free(); }  // where blocks have no identity
  // Only for a restored scheduler that counts: how many blocks are free.
  void set_num_free_blocks(std::int64_t count) { counted_.set_num_free(count); }

  void open(std::int32_t slot, const RequestSpec& spec);  // a request takes this slot
  // Leading blocks of the request that are cached now; remembered for the next allocate() call.
  std::int64_t find_hits(std::int32_t slot, const RequestState& request) {
    if (!caching_) return 0;
    if (exact_) return find_exact(slot, request);
    const std::int64_t kept = counted_.kept(slot);
    return kept == 0 ? 0 : std::min(kept, (request.num_tokens() - 1) / block_size_);
  }
  // Whether an admission of this many tokens would get its blocks if `taken` of the free ones were gone.
  bool admissible(const RequestState& request, std::int64_t tokens, std::int64_t num_hits, std::int64_t watermark,
                  std::int64_t taken) const;
  // Blocks for computed + hits + tokens; checks first, changes nothing on failure. An admission also passes the
  // full-prompt check and leaves the watermark. Source: VLLM_SCHEDULER.md 3.3.
  bool allocate(std::int32_t slot, RequestState& request, std::int64_t tokens, std::int64_t num_hits,
                bool admission, std::int64_t watermark) {
    const std::int64_t idle = exact_ ? count_idle_hits(num_hits) : num_hits;
    const std::int64_t end = request.num_computed_tokens + num_hits * block_size_ + tokens;
    const std::int64_t fresh = fresh_blocks(request, end, num_hits, admission, num_free_blocks() - idle - watermark);
    if (fresh < 0) return false;
    request.num_blocks += narrow(num_hits + fresh);
    if (exact_) {
      take_exact(slot, num_hits, fresh);
    } else {
      if (num_hits > 0) counted_.reclaim(slot, num_hits);
      counted_.take(fresh);
    }
    cache_blocks(slot, request, end);
    return true;
  }
  void take_counted(std::int64_t blocks) { counted_.take(blocks); }
  // Whether it does not matter which blocks of a request that ends have a hash.
  bool forgets_hashes() const { return !exact_ && counted_.keeps_nothing(); }
  void release(std::int32_t slot, RequestState& request, bool preempted) {
    if (exact_) {
      release_exact(slot);
    } else if (!preempted && counted_.keeps_nothing()) {
      counted_.release(request.num_blocks, 0);
    } else if (preempted || request.num_blocks == 0) {
      release_kept(slot, request, preempted);
    } else {
      const std::int64_t hashed = caching_ ? request.num_registered_tokens / block_size_ : 0;
      counted_.release(request.num_blocks - hashed, hashed);
    }
    request.num_blocks = 0;
    request.num_registered_tokens = 0;
  }
  // Hash the full blocks within the first tokens of a request (results of the asynchronous loop).
  void cache_blocks(std::int32_t slot, RequestState& request, std::int64_t tokens) {
    if (!caching_) return;
    const std::int64_t known = std::min(tokens, request.num_tokens());
    request.num_registered_tokens = std::max(request.num_registered_tokens, narrow(known));
    if (exact_) register_exact(slot, request, known / block_size_);
  }

  const std::vector<std::int32_t>& block_table(std::int32_t slot) const {
    return tables_[static_cast<std::size_t>(slot)].blocks;
  }

 private:
  struct Table {
    std::vector<std::int32_t> blocks;
    std::vector<std::uint64_t> hashes;  // chained, of the leading full blocks; extended on demand
    std::int64_t num_registered = 0;
    std::vector<TokenRun> prompt;
    std::uint64_t first_output = 0;
  };

  Table& table(std::int32_t slot) { return tables_[static_cast<std::size_t>(slot)]; }
  void extend_hashes(Table& table, const RequestState& request, std::int64_t blocks);
  std::int64_t blocks_for(std::int64_t tokens) const { return (tokens + block_size_ - 1) / block_size_; }
  std::int64_t fresh_blocks(const RequestState& request, std::int64_t end, std::int64_t num_hits, bool admission,
                            std::int64_t available) const {
    const auto blocks = [this](std::int64_t tokens) { return blocks_for(std::min(tokens, max_model_len_)); };
    return simcluster::fresh_blocks(blocks, end, num_hits + request.num_blocks,
                                    admission && reserve_full_isl_ ? request.num_tokens() : 0, available);
  }
  std::int64_t find_exact(std::int32_t slot, const RequestState& request);
  std::int64_t count_idle_hits(std::int64_t num_hits) const;
  void take_exact(std::int32_t slot, std::int64_t num_hits, std::int64_t fresh);
  void register_exact(std::int32_t slot, const RequestState& request, std::int64_t full_blocks);
  void release_exact(std::int32_t slot);
  // Of a request that is preempted, or ends while it waits after a preemption.
  void release_kept(std::int32_t slot, const RequestState& request, bool preempted);

  std::int64_t block_size_, max_model_len_;
  bool exact_, caching_, reserve_full_isl_;
  CountedPool counted_;
  BlockPool pool_;  // of the exact make
  std::vector<Table> tables_;
  std::vector<std::int32_t> hits_;
};

}  // namespace simcluster
