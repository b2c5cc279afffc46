// A library of NCCL's name that stands in for it: sends and receives of programs without a GPU.
//
// It has the functions that cuda/program/nccl.h looks up. Each call is written down in the journal of
// cuda_runtime_api.h. Where a test wants it, rows travel between processes as files: a message of rank 0 to
// rank 1 is the file 0.1.<number> in the folder that is the communicator's id. It arrives when the group
// ends.
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {

struct Id {
  char bytes[128];
};

struct Comm {
  std::string folder;
  int ranks, rank;
  std::map<std::pair<int, int>, int> messages;  // so far, by source and destination
};

struct Message {
  Comm* comm;
  int from, to;
  void* data;
  size_t bytes;
};

void (*note)(const char*, void*, int64_t, int64_t, int64_t) = nullptr;
bool moves = false;
std::string folder, failing;
int fails_after = 0;  // so many calls of the failing function succeed first
int async_error = 0;
std::atomic<int> aborts{0};
std::atomic<bool> is_stuck{false};  // calls of the failing function wait until a communicator is aborted
int depth = 0;
std::vector<Message> queued;

int called(const char* name, void* stream = nullptr, int64_t first = 0, int64_t second = 0,
           int64_t third = 0) {
  if (note) note(name, stream, first, second, third);
  if (failing != name || fails_after-- > 0) return 0;
  while (is_stuck && !aborts) usleep(1000);
  failing.clear();
  return 3;
}

std::string path_of(const Message& message) {
  const int number = message.comm->messages[{message.from, message.to}]++;
  return message.comm->folder + "/" + std::to_string(message.from) + "." + std::to_string(message.to) + "." +
         std::to_string(number);
}

int send(const Message& message) {
  const std::string path = path_of(message), unfinished = path + ".unfinished";
  std::FILE* const file = std::fopen(unfinished.c_str(), "wb");
  if (!file) return 2;
  const size_t written = std::fwrite(message.data, 1, message.bytes, file);
  std::fclose(file);
  return written == message.bytes && std::rename(unfinished.c_str(), path.c_str()) == 0 ? 0 : 2;
}

int receive(const Message& message) {
  const std::string path = path_of(message);
  struct stat found;
  for (int tries = 0; stat(path.c_str(), &found) != 0; ++tries) {
    if (tries > 20000) return 6;
    usleep(1000);
  }
  if (static_cast<size_t>(found.st_size) != message.bytes) return 5;  // the peer sent another number of rows
  std::FILE* const file = std::fopen(path.c_str(), "rb");
  const size_t read = std::fread(message.data, 1, message.bytes, file);
  std::fclose(file);
  unlink(path.c_str());
  return read == message.bytes ? 0 : 2;
}

}  // namespace

extern "C" {

void stub_nccl_set(void (*to)(const char*, void*, int64_t, int64_t, int64_t), const char* id, int runs) {
  note = to, folder = id, moves = runs != 0;
  failing.clear(), async_error = depth = 0, queued.clear();
  aborts = 0, is_stuck = false;
}
void stub_nccl_fail(const char* name, int after) { failing = name, fails_after = after; }
void stub_nccl_async_error(int error) { async_error = error; }
void stub_nccl_stuck(int stuck) { is_stuck = stuck != 0; }
int stub_nccl_depth() { return depth; }
int stub_nccl_aborts() { return aborts; }

int ncclGetUniqueId(Id* id) {
  std::memset(id->bytes, 0, sizeof id->bytes);
  std::strncpy(id->bytes, folder.c_str(), sizeof id->bytes - 1);
  return called("ncclGetUniqueId");
}
int ncclCommInitRank(void** comm, int ranks, Id id, int rank) {
  *comm = new Comm{id.bytes, ranks, rank, {}};
  return called("ncclCommInitRank", nullptr, ranks, rank);
}
int ncclCommAbort(void*) {
  if (note) note("ncclCommAbort", nullptr, 0, 0, 0);
  ++aborts;
  return 0;
}
int ncclCommGetAsyncError(void*, int* error) {
  *error = async_error;
  return called("ncclCommGetAsyncError");
}
int ncclGroupStart() {
  const int error = called("ncclGroupStart");
  if (!error) ++depth;
  return error;
}
int ncclGroupEnd() {
  const int error = called("ncclGroupEnd");
  if (--depth < 0) return 4;
  const std::vector<Message> messages = std::move(queued);
  queued.clear();
  if (error || !moves) return error;
  for (const Message& message : messages)
    if (message.from == message.comm->rank)
      if (const int failed = send(message)) return failed;
  for (const Message& message : messages)
    if (message.to == message.comm->rank)
      if (const int failed = receive(message)) return failed;
  return 0;
}
int ncclSend(const void* from, size_t count, int, int peer, void* comm, void* stream) {
  if (depth != 1) return 4;
  auto* const own = static_cast<Comm*>(comm);
  queued.push_back({own, own->rank, peer, const_cast<void*>(from), count});
  return called("ncclSend", stream, peer, static_cast<int64_t>(count), reinterpret_cast<intptr_t>(from));
}
int ncclRecv(void* to, size_t count, int, int peer, void* comm, void* stream) {
  if (depth != 1) return 4;
  auto* const own = static_cast<Comm*>(comm);
  queued.push_back({own, peer, own->rank, to, count});
  return called("ncclRecv", stream, peer, static_cast<int64_t>(count), reinterpret_cast<intptr_t>(to));
}
const char* ncclGetErrorString(int error) {
  return error == 3 ? "an error that a test asked for" : "an error of the stand-in";
}
}
