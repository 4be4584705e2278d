// A snapshot as bytes, which can be sent or kept.
#pragma once

#include <string>
#include <string_view>

#include "snapshot.hpp"

namespace simcluster {

// Every field that restoring or an estimate reads; equal on every machine. Throws std::invalid_argument for a snapshot
// with more than two batches in flight.
std::string to_bytes(const Snapshot& snapshot);

// And back. Throws std::invalid_argument for bytes that are damaged, of another layout or no snapshot at all.
Snapshot from_bytes(std::string_view bytes);

}  // namespace simcluster
