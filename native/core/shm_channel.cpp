#include "shm_channel.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <utility>

#include "prefetch.hpp"

namespace simcluster {
namespace {

constexpr std::uint64_t kMagic = 0x70616e732d6d6973;  // "sim-snap" where bytes of a word come lowest first
constexpr std::uint64_t kLayout = 1;                  // of this header and the ring
constexpr std::uint64_t kOpen = 1, kClosed = 2;

// The header's words. `magic` is written last, when all else is in place.
enum HeaderWord : std::size_t {
  kMagicAt,
  kLayoutAt,
  kVersionAt,
  kNumSlotsAt,
  kCapacityAt,
  kNumAttributesAt,
  kPidAt,
  kStateAt,
  kNewestAt = 8,  // on a line of its own
  kAttributesAt = 16,
  kHeaderWords = kAttributesAt + kMaxAttributes,
};
static_assert(kHeaderWords % 8 == 0);

std::string path_of(const std::string& name) {
  constexpr std::size_t kLongest = 100;
  const bool plain = name.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") ==
                     std::string::npos;
  if (name.empty() || name.size() > kLongest || !plain) {
    throw std::invalid_argument("shared memory name \"" + name.substr(0, kLongest) +
                                "\"; must be 1 to 100 letters, digits, dots, dashes or underscores");
  }
  return "/simcluster." + name;
}

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw std::runtime_error("shared memory /dev/shm" + path + ": " + what);
}
[[noreturn]] void fail_with_errno(const std::string& path, const char* what) {
  fail(path, std::string(what) + ": " + std::strerror(errno));
}

// A lock of the open file, not of the process: closing another descriptor of the same file keeps it.
bool take_lock(int file) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return fcntl(file, F_OFD_SETLK, &lock) == 0;
}

bool names(const std::string& path, int file) {
  struct stat own {}, named {};
  const int again = shm_open(path.c_str(), O_RDONLY | O_CLOEXEC, 0);
  if (again < 0) return false;
  const bool same = fstat(file, &own) == 0 && fstat(again, &named) == 0 && own.st_ino == named.st_ino;
  ::close(again);
  return same;
}

// A new and empty file under this name whose lock is ours; what a dead writer left goes.
int create_file(const std::string& path) {
  constexpr int kTries = 100;  // others may start at the same time
  for (int i = 0; i < kTries; ++i) {
    const int file = shm_open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, S_IRUSR | S_IWUSR);
    if (file < 0) fail_with_errno(path, "cannot be opened");
    if (!take_lock(file)) {
      const int error = errno;
      ::close(file);
      errno = error;
      if (error != EAGAIN && error != EACCES) fail_with_errno(path, "cannot be locked");
      fail(path, "another process publishes under this name; stop it, or take another name");
    }
    struct stat found {};
    if (names(path, file) && fstat(file, &found) == 0) {
      if (found.st_size == 0) return file;
      shm_unlink(path.c_str());
    }
    ::close(file);
  }
  fail(path, "other processes keep replacing it");
}

SeqlockRing ring_in(SharedWord* words, std::size_t num_slots, std::size_t capacity) {
  return {words + kNewestAt, words + kHeaderWords, num_slots, capacity};
}

}  // namespace

std::int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

ShmSegment::~ShmSegment() {
  if (words_ != nullptr) munmap(static_cast<void*>(words_), bytes_);
  if (file_ >= 0) ::close(file_);
}

void ShmSegment::swap(ShmSegment& other) noexcept {
  std::swap(file_, other.file_);
  std::swap(words_, other.words_);
  std::swap(bytes_, other.bytes_);
}

ShmWriter::ShmWriter(const std::string& name, const ChannelShape& shape) : path_(path_of(name)) {
  if (shape.num_slots < 1 || shape.capacity < 1 || shape.attributes.size() > kMaxAttributes) {
    throw std::invalid_argument("a channel needs a slot, a word and no more than 48 attributes");
  }
  ShmSegment segment;
  segment.file_ = create_file(path_);
  segment.bytes_ = (kHeaderWords + SeqlockRing::words(shape.num_slots, shape.capacity)) * sizeof(SharedWord);
  // Now, not by a fault later: a full /dev/shm would kill the process that writes.
  if (const int error = posix_fallocate(segment.file_, 0, static_cast<off_t>(segment.bytes_)); error != 0) {
    shm_unlink(path_.c_str());
    errno = error;
    fail_with_errno(path_, "has no room");
  }
  void* const memory = mmap(nullptr, segment.bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, segment.file_, 0);
  if (memory == MAP_FAILED) {
    shm_unlink(path_.c_str());
    fail_with_errno(path_, "cannot be mapped");
  }
  segment.words_ = static_cast<SharedWord*>(memory);  // zeroes
  SharedWord* const words = segment.words_;
  words[kLayoutAt].store(kLayout, std::memory_order_relaxed);
  words[kVersionAt].store(shape.version, std::memory_order_relaxed);
  words[kNumSlotsAt].store(shape.num_slots, std::memory_order_relaxed);
  words[kCapacityAt].store(shape.capacity, std::memory_order_relaxed);
  words[kNumAttributesAt].store(shape.attributes.size(), std::memory_order_relaxed);
  words[kPidAt].store(static_cast<std::uint64_t>(getpid()), std::memory_order_relaxed);
  words[kStateAt].store(kOpen, std::memory_order_relaxed);
  for (std::size_t i = 0; i < shape.attributes.size(); ++i) {
    words[kAttributesAt + i].store(shape.attributes[i], std::memory_order_relaxed);
  }
  words[kMagicAt].store(kMagic, std::memory_order_release);
  ring_ = ring_in(words, shape.num_slots, shape.capacity);
  segment_ = std::move(segment);
}

void ShmWriter::close() {
  if (is_closed()) return;
  segment_.words()[kStateAt].store(kClosed, std::memory_order_release);
  if (names(path_, segment_.file())) shm_unlink(path_.c_str());
  segment_ = ShmSegment();
}

ShmReader::ShmReader(const std::string& name, std::uint64_t version) : path_(path_of(name)), version_(version) {}

bool ShmReader::is_held() const {
  struct flock lock {};
  lock.l_type = F_RDLCK;
  lock.l_whence = SEEK_SET;
  return fcntl(segment_.file(), F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

// Maps what is under the name now, if a living writer has made it complete and it is not the one we have.
bool ShmReader::attach() {
  ShmSegment found;
  found.file_ = shm_open(path_.c_str(), O_RDONLY | O_CLOEXEC, 0);
  struct stat now {};
  if (found.file_ < 0 || fstat(found.file_, &now) != 0) return false;
  struct stat own {};
  if (segment_.file_ >= 0 && fstat(segment_.file_, &own) == 0 && own.st_ino == now.st_ino) return false;
  found.bytes_ = static_cast<std::size_t>(now.st_size);
  if (found.bytes_ < kHeaderWords * sizeof(SharedWord)) return false;
  void* const memory = mmap(nullptr, found.bytes_, PROT_READ, MAP_SHARED, found.file_, 0);
  if (memory == MAP_FAILED) return false;
  found.words_ = static_cast<SharedWord*>(memory);
  const SharedWord* const words = found.words_;
  if (words[kMagicAt].load(std::memory_order_acquire) != kMagic) return false;
  const auto word = [&](std::size_t at) { return words[at].load(std::memory_order_relaxed); };
  const std::size_t room = found.bytes_ / sizeof(SharedWord) - kHeaderWords;
  const std::uint64_t slots = word(kNumSlotsAt), capacity = word(kCapacityAt), count = word(kNumAttributesAt);
  const bool fits = slots > 0 && capacity > 0 && capacity < room && slots <= room / (capacity + SeqlockRing::kOverhead);
  if (word(kLayoutAt) != kLayout || word(kVersionAt) != version_ || !fits || count > kMaxAttributes) return false;
  attributes_.clear();
  for (std::size_t i = 0; i < count; ++i) attributes_.push_back(word(kAttributesAt + i));
  writer_pid_ = static_cast<std::int64_t>(word(kPidAt));
  ring_ = ring_in(found.words_, slots, capacity);
  segment_ = std::move(found);
  record_ = std::make_shared<Words>();
  number_ = 0;
  ++generation_;
  return true;
}

bool ShmReader::copy_newest() {
  const std::uint64_t newest = ring_.newest->load(std::memory_order_acquire);
  if (newest == number_) return false;
  // One for all readers, so that it is in the cache: what another one has just replaced.
  static thread_local std::shared_ptr<Words> replaced;
  std::shared_ptr<Words>& spare = *in_register(&replaced);
  if (spare == nullptr || spare.use_count() > 1) spare = std::make_shared<Words>();
  const std::uint64_t number = read_record(ring_, *spare);
  if (number == 0) {
    ++num_misses_;
    return false;
  }
  record_.swap(spare);
  number_ = number;
  return true;
}

bool ShmReader::poll(std::int64_t now_ns, bool asks) {
  bool changed = false;
  if (state_ == SourceState::live) {
    changed = copy_newest();
    const bool closed = segment_.words()[kStateAt].load(std::memory_order_acquire) == kClosed;
    if (closed) {
      state_ = SourceState::closed;
      changed = copy_newest() || changed;  // its last word
    } else if (asks && now_ns >= next_look_ && !changed) {
      next_look_ = now_ns + kLookEvery;
      if (!is_held()) {
        state_ = segment_.words()[kStateAt].load(std::memory_order_acquire) == kClosed ? SourceState::closed
                                                                                       : SourceState::dead;
        changed = copy_newest();
      }
    }
    if (state_ == SourceState::live) return changed;
    next_look_ = 0;
  }
  if (!asks || now_ns < next_look_) return changed;
  next_look_ = now_ns + kLookEvery;
  const bool had = number_ != 0;
  if (!attach()) return changed;
  // What a writer left that died before anybody looked is its last word too.
  state_ = is_held() ? SourceState::live : SourceState::dead;
  return copy_newest() || had;
}

}  // namespace simcluster
