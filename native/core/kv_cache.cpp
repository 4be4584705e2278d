#include "kv_cache.hpp"

#include <algorithm>

#include "hash.hpp"

namespace simcluster {
namespace {

constexpr std::uint64_t kEosToken = 2;

std::size_t at(std::int32_t i) { return static_cast<std::size_t>(i); }

std::uint64_t nonzero(std::uint64_t hash) { return hash != 0 ? hash : 1; }

}  // namespace

BlockPool::BlockPool(std::int64_t num_blocks) {
  const auto n = static_cast<std::size_t>(num_blocks);
  next_.resize(n);
  prev_.resize(n);
  refs_.assign(n, 0);
  hashes_.assign(n, 0);
  next_same_hash_.assign(n, 0);
  for (std::size_t b = 0; b < n; ++b) {
    next_[b] = static_cast<std::int32_t>(b + 1 < n ? b + 1 : 0);
    prev_[b] = static_cast<std::int32_t>(b > 0 ? b - 1 : n - 1);
  }
  num_free_ = num_blocks > 0 ? num_blocks - 1 : 0;
}

std::int32_t BlockPool::find(std::uint64_t hash) const {
  const auto it = first_of_hash_.find(hash);
  return it == first_of_hash_.end() ? 0 : it->second;
}

void BlockPool::unlink(std::int32_t block) {
  next_[at(prev_[at(block)])] = next_[at(block)];
  prev_[at(next_[at(block)])] = prev_[at(block)];
  --num_free_;
}

void BlockPool::link_after(std::int32_t position, std::int32_t block) {
  const std::int32_t after = next_[at(position)];
  next_[at(position)] = block;
  prev_[at(block)] = position;
  next_[at(block)] = after;
  prev_[at(after)] = block;
  ++num_free_;
}

void BlockPool::forget_hash(std::int32_t block) {
  const std::uint64_t hash = hashes_[at(block)];
  if (hash == 0) return;
  hashes_[at(block)] = 0;
  const std::int32_t later = next_same_hash_[at(block)];
  next_same_hash_[at(block)] = 0;
  const auto it = first_of_hash_.find(hash);
  if (it->second == block) {
    if (later == 0) {
      first_of_hash_.erase(it);
    } else {
      it->second = later;
    }
    return;
  }
  std::int32_t before = it->second;
  while (next_same_hash_[at(before)] != block) before = next_same_hash_[at(before)];
  next_same_hash_[at(before)] = later;
}

std::int32_t BlockPool::take() {
  const std::int32_t block = next_[0];
  unlink(block);
  forget_hash(block);
  refs_[at(block)] = 1;
  return block;
}

void BlockPool::touch(std::int32_t block) {
  if (refs_[at(block)] == 0) unlink(block);
  ++refs_[at(block)];
}

void BlockPool::register_hash(std::int32_t block, std::uint64_t hash) {
  hashes_[at(block)] = hash;
  const auto [it, inserted] = first_of_hash_.try_emplace(hash, block);
  if (inserted) return;
  std::int32_t last = it->second;
  while (next_same_hash_[at(last)] != 0) last = next_same_hash_[at(last)];
  next_same_hash_[at(last)] = block;
}

void BlockPool::release(const std::vector<std::int32_t>& table) {
  // Unhashed blocks go to the front in tail-to-head order, so the tail is handed out next; hashed ones to the end.
  std::int32_t front = 0;
  for (auto it = table.rbegin(); it != table.rend(); ++it) {
    const std::int32_t block = *it;
    if (--refs_[at(block)] > 0) continue;
    if (hashes_[at(block)] != 0) {
      link_after(prev_[0], block);
    } else {
      link_after(front, block);
      front = block;
    }
  }
}

KvCache::KvCache(const SchedulerConfig& config)
    : block_size_(config.block_size),
      max_model_len_(config.max_model_len),
      exact_(config.enable_prefix_caching || config.track_blocks),
      caching_(config.enable_prefix_caching),
      reserve_full_isl_(config.scheduler_reserve_full_isl),
      num_free_(config.num_usable_blocks()),
      pool_(exact_ ? config.num_gpu_blocks : 0) {}

void KvCache::open(std::int32_t slot, const RequestSpec& spec) {
  if (!exact_) return;
  if (at(slot) >= tables_.size()) tables_.resize(at(slot) + 1);
  Table& t = table(slot);
  t.blocks.clear();
  t.hashes.clear();
  t.num_registered = 0;
  if (!caching_) return;
  const std::uint64_t own = mix64(static_cast<std::uint64_t>(spec.id) + 0x5117c1e5ULL);
  t.prompt = spec.prompt;
  if (t.prompt.empty()) t.prompt.push_back({own, spec.num_prompt_tokens});
  t.first_output = spec.first_output != 0 ? spec.first_output : mix64(own);
}

void KvCache::extend_hashes(Table& t, const RequestState& request, std::int64_t blocks) {
  std::size_t run = 0;
  std::int64_t run_start = 0;
  for (auto b = static_cast<std::int64_t>(t.hashes.size()); b < blocks; ++b) {
    std::uint64_t hash = t.hashes.empty() ? 0 : t.hashes.back();
    for (std::int64_t i = b * block_size_; i < (b + 1) * block_size_; ++i) {
      std::uint64_t token = 0;
      if (i >= request.num_prompt_tokens) {
        const std::int64_t k = i - request.num_prompt_tokens;
        token = request.eos_at == k + 1 ? kEosToken : t.first_output + static_cast<std::uint64_t>(k);
      } else {
        while (run_start + t.prompt[run].count <= i) run_start += t.prompt[run++].count;
        token = t.prompt[run].first + static_cast<std::uint64_t>(i - run_start);
      }
      hash = mix64(hash ^ mix64(token));
    }
    t.hashes.push_back(nonzero(hash));
  }
}

std::int64_t KvCache::find_hits(std::int32_t slot, const RequestState& request) {
  hits_.clear();
  if (!caching_) return 0;
  Table& t = table(slot);
  const std::int64_t limit = (request.num_tokens() - 1) / block_size_;
  extend_hashes(t, request, limit);
  for (std::int64_t b = 0; b < limit; ++b) {
    const std::int32_t block = pool_.find(t.hashes[static_cast<std::size_t>(b)]);
    if (block == 0) break;
    hits_.push_back(block);
  }
  return static_cast<std::int64_t>(hits_.size());
}

bool KvCache::allocate(std::int32_t slot, RequestState& request, std::int64_t tokens, std::int64_t num_hits,
                       bool admission, std::int64_t watermark) {
  std::int64_t idle = 0;
  for (std::int64_t h = 0; h < num_hits; ++h) idle += pool_.idle(hits_[static_cast<std::size_t>(h)]) ? 1 : 0;
  const std::int64_t held = num_hits + request.num_blocks;
  const std::int64_t free = num_free_blocks();
  const auto blocks_for = [this](std::int64_t t) { return (t + block_size_ - 1) / block_size_; };
  const auto needed = [&](std::int64_t t) { return std::max<std::int64_t>(blocks_for(t) - held, 0) + idle; };
  if (admission && reserve_full_isl_ &&
      needed(std::min(request.num_tokens(), max_model_len_)) + watermark > free) {
    return false;
  }
  const std::int64_t end = request.num_computed_tokens + num_hits * block_size_ + tokens;
  const std::int64_t covered = std::min(end, max_model_len_);
  if (needed(covered) + watermark > free) return false;

  const std::int64_t fresh = std::max<std::int64_t>(blocks_for(covered) - held, 0);
  request.num_blocks = held + fresh;
  if (!exact_) {
    num_free_ -= fresh;
    return true;
  }
  Table& t = table(slot);
  if (num_hits > 0) {
    for (const std::int32_t block : hits_) pool_.touch(block);
    t.blocks.insert(t.blocks.end(), hits_.begin(), hits_.end());
    t.num_registered = num_hits;
  }
  for (std::int64_t i = 0; i < fresh; ++i) t.blocks.push_back(pool_.take());
  cache_blocks(slot, request, std::min(end, request.num_tokens()));
  return true;
}

void KvCache::cache_blocks(std::int32_t slot, const RequestState& request, std::int64_t tokens) {
  if (!caching_) return;
  Table& t = table(slot);
  const std::int64_t full = std::min(tokens, request.num_tokens()) / block_size_;
  extend_hashes(t, request, full);
  for (std::int64_t b = t.num_registered; b < full; ++b) {
    pool_.register_hash(t.blocks[static_cast<std::size_t>(b)], t.hashes[static_cast<std::size_t>(b)]);
  }
  t.num_registered = std::max(t.num_registered, full);
}

void KvCache::release(std::int32_t slot, RequestState& request) {
  if (exact_) {
    Table& t = table(slot);
    pool_.release(t.blocks);
    t.blocks.clear();
    t.num_registered = 0;
  } else {
    num_free_ += request.num_blocks;
  }
  request.num_blocks = 0;
}

}  // namespace simcluster
