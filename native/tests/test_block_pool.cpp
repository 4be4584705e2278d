#include <vector>

#include "check.hpp"
#include "kv_cache.hpp"

using namespace simcluster;
using namespace simcluster::testing;

namespace {

using Blocks = std::vector<std::int32_t>;

Blocks take(BlockPool& pool, int count) {
  Blocks blocks;
  for (int i = 0; i < count; ++i) blocks.push_back(pool.take());
  return blocks;
}

void the_null_block_is_never_given_out() {
  BlockPool pool(5);
  CHECK(pool.num_free() == 4);
  CHECK((take(pool, 4) == Blocks{1, 2, 3, 4}));
  CHECK(pool.num_free() == 0);
}

void blocks_without_a_hash_are_reused_first_the_tail_before_the_head() {
  BlockPool pool(7);
  const Blocks table = take(pool, 3);
  pool.release(table);
  CHECK(pool.num_free() == 6);
  CHECK((take(pool, 6) == Blocks{3, 2, 1, 4, 5, 6}));
}

void blocks_with_a_hash_go_to_the_end_of_the_free_list() {
  BlockPool pool(7);
  const Blocks table = take(pool, 3);
  pool.register_hash(1, 11);
  pool.register_hash(2, 22);
  pool.release(table);
  CHECK(pool.find(11) == 1 && pool.find(22) == 2 && pool.find(33) == 0);
  CHECK((take(pool, 6) == Blocks{3, 4, 5, 6, 2, 1}));
}

void handing_out_a_block_forgets_its_hash() {
  BlockPool pool(3);
  const Blocks table = take(pool, 1);
  pool.register_hash(1, 11);
  pool.release(table);
  CHECK((take(pool, 1) == Blocks{2}));
  CHECK(pool.find(11) == 1);
  CHECK((take(pool, 1) == Blocks{1}));
  CHECK(pool.find(11) == 0);
  pool.release({1});
  CHECK((take(pool, 1) == Blocks{1}));  // without its hash it went to the front
}

void of_equal_blocks_the_first_still_present_is_found() {
  BlockPool pool(5);
  take(pool, 4);
  for (const std::int32_t block : {3, 1, 4}) pool.register_hash(block, 77);
  CHECK(pool.find(77) == 3);
  pool.release({1});  // evict from the middle of the chain
  CHECK((take(pool, 1) == Blocks{1}));
  CHECK(pool.find(77) == 3);
  pool.release({3});
  CHECK((take(pool, 1) == Blocks{3}));
  CHECK(pool.find(77) == 4);
  pool.register_hash(1, 77);
  CHECK(pool.find(77) == 4);
  pool.release({4});
  CHECK((take(pool, 1) == Blocks{4}));
  CHECK(pool.find(77) == 1);
}

void a_touched_block_leaves_the_free_list_and_counts_its_users() {
  BlockPool pool(4);
  const Blocks table = take(pool, 2);
  pool.register_hash(1, 11);
  pool.release(table);
  CHECK(pool.idle(1) && pool.num_free() == 3);
  pool.touch(1);
  pool.touch(1);
  CHECK(!pool.idle(1) && pool.num_free() == 2);
  pool.release({1});
  CHECK(!pool.idle(1) && pool.num_free() == 2);
  pool.release({1});
  CHECK(pool.idle(1) && pool.num_free() == 3);
}

void a_counted_pool_keeps_what_a_preempted_request_left_until_others_take_it() {
  CountedPool pool(10);
  pool.take(8);                     // 2 free
  pool.release_preempted(7, 1, 4);  // 1 to the front, 4 with a hash to the end: 7 free
  CHECK(pool.num_free() == 7 && pool.kept(7) == 4 && pool.kept(8) == 0);
  pool.take(3);                     // those in front of the 4
  CHECK(pool.kept(7) == 4);
  pool.take(1);                     // the tail of the table goes first
  CHECK(pool.num_free() == 3 && pool.kept(7) == 3);
  pool.reclaim(7, 2);
  CHECK(pool.num_free() == 1 && pool.kept(7) == 0);
}

void a_counted_pool_evicts_in_order_of_release() {
  CountedPool pool(12);
  pool.take(10);  // 2 free, in front of all that follows
  pool.release_preempted(1, 0, 3);
  pool.release(0, 2);  // of a request that has ended: cached, but nobody will ask for them
  pool.release_preempted(2, 0, 3);
  CHECK(pool.num_free() == 10);
  pool.take(3);
  CHECK(pool.kept(1) == 2 && pool.kept(2) == 3);
  pool.forget(1);
  CHECK(pool.kept(1) == 0);
  pool.take(4);
  CHECK(pool.kept(2) == 3);
  pool.take(2);
  CHECK(pool.kept(2) == 1 && pool.num_free() == 1);
}

}  // namespace

int main() {
  the_null_block_is_never_given_out();
  blocks_without_a_hash_are_reused_first_the_tail_before_the_head();
  blocks_with_a_hash_go_to_the_end_of_the_free_list();
  handing_out_a_block_forgets_its_hash();
  of_equal_blocks_the_first_still_present_is_found();
  a_touched_block_leaves_the_free_list_and_counts_its_users();
  a_counted_pool_keeps_what_a_preempted_request_left_until_others_take_it();
  a_counted_pool_evicts_in_order_of_release();
  return report("block pool");
}
