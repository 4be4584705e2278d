// Paged KV cache of one instance: exact blocks, or plain counts where block identity cannot matter.
#pragma once

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

class KvCache {
 public:
  explicit KvCache(const SchedulerConfig& config);

  std::int64_t num_free_blocks() const { return exact_ ? pool_.num_free() : num_free_; }
  // Only for a restored scheduler that counts: how many blocks are free.
  void set_num_free_blocks(std::int64_t count) { num_free_ = count; }

  void open(std::int32_t slot, const RequestSpec& spec);  // a request takes this slot
  // Leading blocks of the request that are cached now; remembered for the next allocate() call.
  std::int64_t find_hits(std::int32_t slot, const RequestState& request);
  // Blocks for computed + hits + tokens; checks first, changes nothing on failure. An admission also passes the
  // full-prompt check and leaves the watermark. Source: VLLM_SCHEDULER.md 3.3.
  bool allocate(std::int32_t slot, RequestState& request, std::int64_t tokens, std::int64_t num_hits,
                bool admission, std::int64_t watermark);
  void release(std::int32_t slot, RequestState& request);
  // Hash the full blocks within the first tokens of a request (results of the asynchronous loop).
  void cache_blocks(std::int32_t slot, const RequestState& request, std::int64_t tokens);

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

  std::int64_t block_size_, max_model_len_;
  bool exact_, caching_, reserve_full_isl_;
  std::int64_t num_free_;  // of the counting make
  BlockPool pool_;         // of the exact make
  std::vector<Table> tables_;
  std::vector<std::int32_t> hits_;
};

}  // namespace simcluster
