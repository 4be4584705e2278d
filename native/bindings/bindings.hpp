#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <vector>

void bind_scheduler(nanobind::module_& m);
void bind_sfs_plus(nanobind::module_& m);
void bind_engine(nanobind::module_& m);
void bind_view(nanobind::module_& m);
void bind_decide(nanobind::module_& m);
void bind_bench(nanobind::module_& m);
void bind_cluster(nanobind::module_& m);
void bind_channel(nanobind::module_& m);
void bind_watch(nanobind::module_& m);
void bind_relay(nanobind::module_& m);

// Move rows of int64 into a NumPy array of shape (rows, columns).
using Int64Table = nanobind::ndarray<nanobind::numpy, std::int64_t, nanobind::ndim<2>>;

inline Int64Table to_table(std::vector<std::int64_t>&& values, std::size_t columns) {
  auto* data = new std::vector<std::int64_t>(std::move(values));
  nanobind::capsule owner(data, [](void* p) noexcept { delete static_cast<std::vector<std::int64_t>*>(p); });
  return Int64Table(data->data(), {data->size() / columns, columns}, owner);
}
