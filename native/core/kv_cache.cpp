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

std::vector<CountedPool::Stretch>::iterator CountedPool::find(std::int32_t slot) {
  return std::find_if(stretches_.begin(), stretches_.end(), [&](const Stretch& s) { return s.slot == slot; });
}

void CountedPool::merge(std::vector<Stretch>::iterator it, std::int64_t left) {
  const std::int64_t dead = it->dead_before + left;
  it = stretches_.erase(it);
  if (it != stretches_.end()) it->dead_before += dead;
}

void CountedPool::evict(std::int64_t count) {
  while (count > 0 && !stretches_.empty()) {
    Stretch& first = stretches_.front();
    const std::int64_t dead = std::min(count, first.dead_before);
    first.dead_before -= dead;
    const std::int64_t lost = std::min(count - dead, first.blocks);  // the tail of the request's table goes first
    first.blocks -= lost;
    count -= dead + lost;
    if (first.blocks == 0) stretches_.erase(stretches_.begin());
  }
}

void CountedPool::release_preempted(std::int32_t slot, std::int64_t unhashed, std::int64_t hashed) {
  release(unhashed, 0);
  if (hashed > 0) {
    std::int64_t before = num_free_;
    for (const Stretch& s : stretches_) before -= s.dead_before + s.blocks;
    stretches_.push_back({slot, hashed, before});
    num_free_ += hashed;
  }
}

std::int64_t CountedPool::kept(std::int32_t slot) const {
  for (const Stretch& s : stretches_) {
    if (s.slot == slot) return s.blocks;
  }
  return 0;
}

void CountedPool::reclaim(std::int32_t slot, std::int64_t count) {
  const auto it = find(slot);
  if (it == stretches_.end()) return;
  num_free_ -= count;
  merge(it, it->blocks - count);
}

void CountedPool::forget(std::int32_t slot) {
  const auto it = find(slot);
  if (it != stretches_.end()) merge(it, it->blocks);
}

KvCache::KvCache(const SchedulerConfig& config)
    : block_size_(config.block_size),
      max_model_len_(config.max_model_len),
      exact_(config.track_blocks || (config.enable_prefix_caching && config.shared_prefixes)),
      caching_(config.enable_prefix_caching),
      reserve_full_isl_(config.scheduler_reserve_full_isl),
      counted_(config.num_usable_blocks()),
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
  t.prompt.assign(spec.prompt.begin(), spec.prompt.end());
  if (t.prompt.empty()) t.prompt.push_back({own, spec.num_prompt_tokens});
  // Not mix64(own): behind a prompt of that one token it would leave nothing of the request in the hash.
  t.first_output = spec.first_output != 0 ? spec.first_output : mix64(~own);
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

std::int64_t KvCache::find_exact(std::int32_t slot, const RequestState& request) {
  const std::int64_t limit = (request.num_tokens() - 1) / block_size_;
  hits_.clear();
  Table& t = table(slot);
  extend_hashes(t, request, limit);
  for (std::int64_t b = 0; b < limit; ++b) {
    const std::int32_t block = pool_.find(t.hashes[static_cast<std::size_t>(b)]);
    if (block == 0) break;
    hits_.push_back(block);
  }
  return static_cast<std::int64_t>(hits_.size());
}

bool KvCache::admissible(const RequestState& request, std::int64_t tokens, std::int64_t num_hits,
                         std::int64_t watermark, std::int64_t taken) const {
  const std::int64_t end = num_hits * block_size_ + tokens;
  return fresh_blocks(request, end, num_hits, true, num_free_blocks() - taken - num_hits - watermark) >= 0;
}

std::int64_t KvCache::count_idle_hits(std::int64_t num_hits) const {
  const auto idle = [this](std::int32_t block) { return pool_.idle(block); };
  return std::count_if(hits_.begin(), hits_.begin() + num_hits, idle);
}

void KvCache::take_exact(std::int32_t slot, std::int64_t num_hits, std::int64_t fresh) {
  Table& t = table(slot);
  if (num_hits > 0) {
    for (const std::int32_t block : hits_) pool_.touch(block);
    t.blocks.insert(t.blocks.end(), hits_.begin(), hits_.end());
    t.num_registered = num_hits;
  }
  for (std::int64_t i = 0; i < fresh; ++i) t.blocks.push_back(pool_.take());
}

void KvCache::register_exact(std::int32_t slot, const RequestState& request, std::int64_t full_blocks) {
  Table& t = table(slot);
  extend_hashes(t, request, full_blocks);
  for (std::int64_t b = t.num_registered; b < full_blocks; ++b) {
    pool_.register_hash(t.blocks[static_cast<std::size_t>(b)], t.hashes[static_cast<std::size_t>(b)]);
  }
  t.num_registered = std::max(t.num_registered, full_blocks);
}

void KvCache::release_exact(std::int32_t slot) {
  Table& t = table(slot);
  pool_.release(t.blocks);
  t.blocks.clear();
  t.num_registered = 0;
}

void KvCache::release_kept(std::int32_t slot, const RequestState& request, bool preempted) {
  const std::int64_t hashed = caching_ ? request.num_registered_tokens / block_size_ : 0;
  if (preempted && caching_) {
    counted_.release_preempted(slot, request.num_blocks - hashed, hashed);
  } else {
    counted_.release(request.num_blocks - hashed, hashed);
    if (caching_) counted_.forget(slot);
  }
}

}  // namespace simcluster
