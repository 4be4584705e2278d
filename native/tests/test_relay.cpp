// The relay between socket pairs: every way of cutting the bytes, slow clients, and whoever leaves.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "stream_relay.hpp"

using namespace simcluster;

namespace {

struct Pair {  // ours[0] is the relay's side
  std::array<int, 2> ends{-1, -1};
  Pair() {
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends.data()) == 0);
  }
  ~Pair() {
    hang_up();
    close(ends[0]);
  }
  void hang_up() {
    if (ends[1] >= 0) close(ends[1]);
    ends[1] = -1;
  }
  void say(std::string_view bytes) const {
    CHECK(::send(ends[1], bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
  }
  std::string hear() const {
    std::string all;
    std::array<char, 70'000> piece;
    for (ssize_t n = 0; (n = recv(ends[1], piece.data(), piece.size(), 0)) > 0;) {
      all.append(piece.data(), static_cast<std::size_t>(n));
    }
    return all;
  }
};

std::string chunk(std::string_view content, const char* extension = "") {
  std::array<char, 32> size;
  std::snprintf(size.data(), size.size(), "%zX%s\r\n", content.size(), extension);
  return size.data() + std::string(content) + "\r\n";
}

std::string without_frames(const std::string& body, bool& ended) {
  std::string content(body.size(), '\0');
  ChunkReader reader;
  content.resize(reader.read(body, content.data()));
  ended = reader.ended();
  return content;
}

const std::vector<std::string> kEvents = {"data: {\"text\":\"x\"}\n\n", "data: y\n\n", "data: [DONE]\n\n"};
const std::string kWhole = kEvents[0] + kEvents[1] + kEvents[2];

std::string body() {
  return chunk(kEvents[0], ";name=\"a value\"") + chunk(kEvents[1] + kEvents[2]) + "000\r\nTrailer: t\r\n\r\n";
}

void any_cut_gives_the_same(bool in_chunks) {
  const std::string sent = body();
  for (std::size_t first = 0; first <= sent.size(); ++first) {
    for (const std::size_t second : {first, std::min(first + 1, sent.size()), sent.size()}) {
      Pair server, client;
      StreamRelay relay;
      auto counter = std::make_shared<EventCounter>();
      const auto id = relay.add(server.ends[0], client.ends[0], counter, in_chunks);
      std::vector<StreamRelay::Ended> ended;
      std::size_t begin = 0;
      for (const std::size_t cut : {first, second, sent.size()}) {
        server.say(std::string_view(sent).substr(begin, cut - begin));
        const auto& news = relay.pump();
        CHECK(news.moved.size() == (cut > begin ? 1u : 0u));
        ended.insert(ended.end(), news.ended.begin(), news.ended.end());
        begin = cut;
      }
      CHECK(ended.size() == 1 && ended[0].id == id && ended[0].end == FlowEnd::whole && ended[0].is_clean);
      relay.remove(id);
      const std::string got = client.hear();
      bool is_closed = true;
      CHECK((in_chunks ? without_frames(got, is_closed) : got) + ended[0].last == kWhole);
      CHECK(is_closed != in_chunks);  // the last chunk is left to the owner
      CHECK(counter->events == 3 && counter->tail() == kWhole);
    }
  }
}

void what_comes_behind_the_body_is_told() {
  Pair server, client;
  StreamRelay relay;
  const auto id = relay.add(server.ends[0], client.ends[0], std::make_shared<EventCounter>(), true);
  server.say(body() + "H");
  const auto& news = relay.pump();
  CHECK(news.ended.size() == 1 && news.ended[0].end == FlowEnd::whole && !news.ended[0].is_clean);
  relay.remove(id);
}

void what_is_not_in_chunks_breaks_the_stream() {
  for (const char* const wrong : {"x", "\r\n", "5", "5\n", "5\r\nabcdefg", "fffffffffffffffff\r\n", "0\r\n\n", "-1\r\n",
                                  "1;\n", "1\r\nab", "5 \rx", "0\r\n\rx", "G\r\n", "0\r\nx: y\n\r\nz"}) {
    Pair server, client;
    StreamRelay relay;
    relay.add(server.ends[0], client.ends[0], std::make_shared<EventCounter>(), true);
    server.say(wrong);
    const auto count = relay.pump().ended.size();
    if (std::string_view(wrong) == "5" || std::string_view(wrong).ends_with('z')) {
      CHECK((count == 1) == (wrong[0] == '0'));  // may yet become one; a bare line feed ends a trailer
      continue;
    }
    CHECK(count == 1);
  }
  ChunkReader reader;
  std::string endless = "1;" + std::string(20'000, 'x');
  std::string out(endless.size(), '\0');
  CHECK(reader.read(endless, out.data()) == 0 && reader.broken());
}

void who_leaves_ends_the_stream() {
  Pair server, client;
  StreamRelay relay;
  const auto counter = std::make_shared<EventCounter>();
  auto id = relay.add(server.ends[0], client.ends[0], counter, true);
  server.say(chunk("data: x\n\n"));
  server.hang_up();
  CHECK(relay.pump().ended.empty());  // what came before counts
  CHECK(counter->events == 1);
  const auto& news = relay.pump();
  CHECK(news.ended.size() == 1 && news.ended[0].end == FlowEnd::server_left);
  CHECK(relay.pump().ended.empty());  // told once
  relay.remove(id);
  relay.remove(id);
  CHECK(relay.num_streams() == 0);

  Pair other, gone;
  id = relay.add(other.ends[0], gone.ends[0], counter, true);
  gone.hang_up();
  other.say(chunk("data: x\n\n"));
  const auto& later = relay.pump();
  CHECK(later.ended.size() == 1 && later.ended[0].id == id && later.ended[0].end == FlowEnd::client_left);
}

// Its socket's number may belong to somebody else by then.
void a_socket_that_was_closed_elsewhere_is_not_mistaken() {
  Pair server, bystander;
  StreamRelay relay;
  {
    Pair client;
    relay.add(server.ends[0], client.ends[0], std::make_shared<EventCounter>(), false);
    const int number = client.ends[0];
    close(number);
    CHECK(dup2(bystander.ends[0], number) == number);
    server.say(chunk("secret"));
    relay.pump();
    CHECK(client.hear() == "secret");
  }
  CHECK(bystander.hear().empty());
}

void a_slow_client_holds_its_server_up(unsigned seed) {
  std::mt19937 random(seed);
  Pair server, client, quick_server, quick_client;
  StreamRelay relay;
  const auto counter = std::make_shared<EventCounter>();
  const auto slow = relay.add(server.ends[0], client.ends[0], counter, false);
  const auto quick = relay.add(quick_server.ends[0], quick_client.ends[0], std::make_shared<EventCounter>(), false);
  std::string content, sent;
  for (int k = 0; k < 400; ++k) {
    std::string event(random() % 20'000, static_cast<char>('a' + random() % 26));
    event += "\n\n";
    content += event;
    sent += chunk(event);
  }
  sent += "0\r\n\r\n";
  std::size_t at = 0;
  std::string got, last;
  bool has_waited = false, has_ended = false;
  const auto pump = [&] {
    for (const auto& each : relay.pump().ended) {
      has_ended = has_ended || (each.id == slow && each.end == FlowEnd::whole);
      last += each.last;
    }
  };
  for (int round = 0; !has_ended || got.size() + last.size() < content.size(); ++round) {
    CHECK(round < 1'000'000);
    if (round >= 1'000'000) return;
    while (at < sent.size()) {
      const ssize_t n = ::send(server.ends[1], sent.data() + at, std::min<std::size_t>(30'000, sent.size() - at), 0);
      if (n <= 0) break;
      at += static_cast<std::size_t>(n);
    }
    pump();
    if (relay.waits_for_client(slow)) {  // then nothing calls for a pump until the client reads
      has_waited = true;
      pollfd file{relay.file(), POLLIN, 0};
      CHECK(poll(&file, 1, 0) == 0);
    }
    if (random() % 16 != 0) {  // it reads seldom; others flow meanwhile
      quick_server.say(chunk("z"));
      pump();
      CHECK(quick_client.hear() == "z");
      continue;
    }
    got += client.hear();
  }
  CHECK(has_waited);
  CHECK(got + last == content);
  CHECK(counter->events == 400);
  CHECK(!relay.waits_for_client(quick));
}

void events_are_counted_however_they_are_cut() {
  std::mt19937 random(7);
  for (int k = 0; k < 300; ++k) {
    std::string text;
    std::int64_t ends = 0;
    for (auto n = random() % 30; n > 0; --n) {
      text += std::string(1 + random() % 400, 'e') + (random() % 4 == 0 ? "\n" : "");  // single ones end nothing
      if (text.back() == '\n') text += 'f';
      text += "\n\n";
      ++ends;
    }
    EventCounter counter;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t count = random() % 50;
      counter.feed(std::string_view(text).substr(at, count));
      at += count;
    }
    CHECK(counter.events == ends);
    CHECK(counter.tail() == text.substr(text.size() - std::min(text.size(), EventCounter::kTail)));
  }
}

}  // namespace

int main() {
  any_cut_gives_the_same(true);
  any_cut_gives_the_same(false);
  what_comes_behind_the_body_is_told();
  what_is_not_in_chunks_breaks_the_stream();
  who_leaves_ends_the_stream();
  a_socket_that_was_closed_elsewhere_is_not_mistaken();
  for (unsigned seed = 0; seed < 3; ++seed) a_slow_client_holds_its_server_up(seed);
  events_are_counted_however_they_are_cut();
  return simcluster::testing::report("relay");
}
