// Passes the answers of servers on to their clients, from socket to socket. Linux.
//
// It has no thread: whoever owns it waits until file() can be read, and calls pump().
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "chunk_reader.hpp"
#include "event_counter.hpp"

namespace simcluster {

// Why a stream flows no more.
enum class FlowEnd : std::uint8_t {
  whole,        // its body has ended, and the client's system has all but what is given out as the last piece
  server_left,  // before the end
  bad_framing,  // what the server sends is not in chunks
  client_left,
};

class StreamRelay {
 public:
  using Id = std::int64_t;
  struct Ended {
    Id id = 0;
    FlowEnd end = FlowEnd::whole;
    std::string last;       // content that came with the end, and can leave together with that of the client's answer
    bool is_clean = false;  // nothing came behind the body: the server can be asked again
  };
  struct News {
    std::vector<Id> moved;  // something came from the server, or went to a client that had kept it waiting
    std::vector<Ended> ended;
  };

  // Throws std::system_error if there are too many open files.
  StreamRelay();
  ~StreamRelay();
  StreamRelay(const StreamRelay&) = delete;
  StreamRelay& operator=(const StreamRelay&) = delete;

  int file() const { return epoll_; }

  // Takes over a stream: `server` is a socket that sends a body in chunks and stands between two of them, `client` one
  // that all before has been given to; neither may block, and nobody else may use them until remove(). `in_chunks`: the
  // client gets chunks, too. Throws std::system_error.
  Id add(int server, int client, std::shared_ptr<EventCounter> counter, bool in_chunks);
  // Lets go of a stream; its sockets stay open.
  void remove(Id id);
  // Whether a stream waits for its client.
  bool waits_for_client(Id id) const;
  std::size_t num_streams() const { return streams_.size(); }

  // Passes on what has come. Never waits. A stream that has ended flows no more, and is to be removed.
  const News& pump();

 private:
  struct Stream {
    int server = -1, client = -1;  // copies: should the socket be closed elsewhere, its number is not used again
    bool in_chunks = true;
    bool is_clean = false;
    std::shared_ptr<EventCounter> counter;
    ChunkReader reader;
    std::string waiting;  // for the client
  };
  enum class Sent : std::uint8_t { all, some, client_left };

  void read(Id id, Stream& stream);
  void write(Id id, Stream& stream);
  Sent send(Stream& stream, std::string_view bytes);
  void end(Id id, Stream& stream, FlowEnd why, std::string_view last = {});
  void watch(int file, Id id, std::uint32_t events);
  void ignore(int file);

  int epoll_ = -1;
  Id last_ = 0;
  std::unordered_map<Id, Stream> streams_;
  std::vector<char> in_, out_;
  News news_;
};

}  // namespace simcluster
