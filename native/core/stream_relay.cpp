#include "stream_relay.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

namespace simcluster {
namespace {

constexpr std::size_t kPiece = 65'536;  // bytes read at once
constexpr std::size_t kFrame = 16;      // room for a chunk's size before its content
constexpr std::size_t kMostAtOnce = 256;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

int copy_of(int file) {
  const int copy = fcntl(file, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) fail("a socket's descriptor cannot be copied");
  return copy;
}

// Puts a frame around the content that stands at `content`; before it is room for it, and two bytes behind.
std::string_view framed(char* content, std::size_t count) {
  char* begin = content;
  *--begin = '\n';
  *--begin = '\r';
  for (std::size_t rest = count; rest > 0; rest /= 16) *--begin = "0123456789abcdef"[rest % 16];
  content[count] = '\r';
  content[count + 1] = '\n';
  return {begin, static_cast<std::size_t>(content + count + 2 - begin)};
}

}  // namespace

StreamRelay::StreamRelay() : epoll_(epoll_create1(EPOLL_CLOEXEC)), in_(kPiece), out_(kFrame + kPiece + 2) {
  if (epoll_ < 0) fail("no epoll");
}

StreamRelay::~StreamRelay() {
  while (!streams_.empty()) remove(streams_.begin()->first);
  close(epoll_);
}

StreamRelay::Id StreamRelay::add(int server, int client, std::shared_ptr<EventCounter> counter, bool in_chunks) {
  const Id id = ++last_;
  Stream& stream = streams_[id];
  try {
    stream.server = copy_of(server);
    stream.client = copy_of(client);
    stream.counter = std::move(counter);
    stream.in_chunks = in_chunks;
    watch(stream.server, id, EPOLLIN);
  } catch (...) {
    remove(id);
    throw;
  }
  return id;
}

void StreamRelay::remove(Id id) {
  const auto found = streams_.find(id);
  if (found == streams_.end()) return;
  // What is watched is not the descriptor but the socket, which stays open elsewhere.
  for (const int file : {found->second.server, found->second.client}) {
    if (file < 0) continue;
    ignore(file);
    close(file);
  }
  streams_.erase(found);
}

bool StreamRelay::waits_for_client(Id id) const {
  const auto found = streams_.find(id);
  return found != streams_.end() && !found->second.waiting.empty();
}

const StreamRelay::News& StreamRelay::pump() {
  news_.moved.clear();
  news_.ended.clear();
  std::array<epoll_event, kMostAtOnce> events;
  const int count = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    const auto id = static_cast<Id>(events[static_cast<std::size_t>(i)].data.u64);
    const auto found = streams_.find(id);
    if (found == streams_.end()) continue;
    Stream& stream = found->second;
    if (stream.waiting.empty()) {
      read(id, stream);
    } else {
      write(id, stream);
    }
  }
  return news_;
}

void StreamRelay::read(Id id, Stream& stream) {
  const ssize_t got = recv(stream.server, in_.data(), in_.size(), 0);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  if (got <= 0) return end(id, stream, FlowEnd::server_left);
  news_.moved.push_back(id);
  char* const content = out_.data() + kFrame;
  const std::size_t count = stream.reader.read({in_.data(), static_cast<std::size_t>(got)}, content);
  stream.is_clean = stream.reader.num_left() == 0;
  if (count > 0) {
    stream.counter->feed({content, count});
    if (stream.reader.ended()) return end(id, stream, FlowEnd::whole, {content, count});
    switch (send(stream, stream.in_chunks ? framed(content, count) : std::string_view(content, count))) {
      case Sent::client_left:
        return end(id, stream, FlowEnd::client_left);
      case Sent::some:  // the server is to wait, too
        ignore(stream.server);
        watch(stream.client, id, EPOLLOUT);
        break;
      case Sent::all:
        break;
    }
  }
  if (stream.reader.broken()) return end(id, stream, FlowEnd::bad_framing);
  if (stream.reader.ended()) end(id, stream, FlowEnd::whole);
}

void StreamRelay::write(Id id, Stream& stream) {
  const std::string rest = std::exchange(stream.waiting, {});
  const Sent sent = send(stream, rest);
  if (sent == Sent::client_left) return end(id, stream, FlowEnd::client_left);
  if (stream.waiting.size() < rest.size()) news_.moved.push_back(id);
  if (sent == Sent::some) return;
  ignore(stream.client);
  watch(stream.server, id, EPOLLIN);
}

StreamRelay::Sent StreamRelay::send(Stream& stream, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::send(stream.client, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      stream.waiting.assign(bytes);
      return Sent::some;
    }
    if (count < 0) return Sent::client_left;
    bytes.remove_prefix(static_cast<std::size_t>(count));
  }
  return Sent::all;
}

void StreamRelay::end(Id id, Stream& stream, FlowEnd why, std::string_view last) {
  ignore(stream.server);
  ignore(stream.client);
  news_.ended.push_back({id, why, std::string(last), stream.is_clean});
}

void StreamRelay::watch(int file, Id id, std::uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = static_cast<std::uint64_t>(id);
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, file, &event) < 0) fail("a socket cannot be watched");
}

void StreamRelay::ignore(int file) { epoll_ctl(epoll_, EPOLL_CTL_DEL, file, nullptr); }

}  // namespace simcluster
