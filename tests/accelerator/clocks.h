// What happens before what on a machine of several devices, told by vector clocks: no threads, no delays, no luck.
//
// Each stream has a clock: for every stream, how many of its kernels have ended by the time that the next kernel of this
// one begins. The host has one too, for all its threads: what it has waited for. A kernel joins its stream's clock with
// the host's, and counts one up. An event is a copy of a clock; to wait for it is to join it.
//
//     stream 1   k1 --- record E                    k1 and k3 both write x: E orders them.
//     stream 2              wait E --- k3           Without the wait, k3's clock knows nothing of k1: reported.
//
// Memory belongs to the stream that it was allocated on: to allocate is to write there, since an earlier owner's kernels
// may still run on that stream. What was freed is given away again by the owner's next allocation: by then the owner must
// know of each other stream's use, unless that stream is recorded.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace sim {

constexpr int DEVICES = 4;
constexpr int STREAMS = 33;  // of a device: the default one, and a pool that is handed out in turns
constexpr int TRACKS = DEVICES * STREAMS;

using Clock = std::vector<uint64_t>;

inline void join(Clock& into, const Clock& other) {
  for (int at = 0; at < TRACKS; ++at) into[at] = std::max(into[at], other[at]);
}

struct Where {  // of a kernel: its name, and the Python lines that called it, if any did
  std::string kernel;
  std::string lines;
};

struct Access {
  int track;
  uint64_t tick;
  bool writes;
  uintptr_t low, high;  // bytes
  Where where;
};

struct Block {
  int device;
  int owner;  // the track that it was allocated on
  size_t size;
  std::vector<Access> accesses;
  std::set<int> recorded;
};

struct Waiting {  // memory that was freed while streams that are recorded on it may still use it
  size_t size;
  int device;
  std::vector<std::pair<int, uint64_t>> until;
};

struct Use {
  uintptr_t low, high;
  bool writes;
};

class Machine {
 public:
  std::mutex mutex;
  bool watches = true;
  std::function<void()> host_has_waited = [] {};

  Machine() : clocks_(TRACKS, Clock(TRACKS, 0)), host_(TRACKS, 0) {}

  void allocate(uintptr_t at, size_t size, int device, int track, Where where) {
    std::lock_guard<std::mutex> lock(mutex);
    settle_();
    uint64_t tick = launch_(track);
    for (const Access& access : given_back_[track])
      if (clocks_[track][access.track] < access.tick)
        report_("freed memory of " + name(track) + " is given away again while " + name(access.track) + " may still use it",
                access.where, where);
    given_back_[track].clear();
    Block block{device, track, size, {}, {}};
    block.accesses.push_back({track, tick, true, at, at + size, std::move(where)});
    blocks_[at] = std::move(block);
    allocated_[device] += size;
    peak_[device] = std::max(peak_[device], allocated_[device] + held_(device));
  }

  void free(uintptr_t at) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = blocks_.find(at);
    if (found == blocks_.end()) return;
    Block& block = found->second;
    Waiting waiting{block.size, block.device, {}};
    std::map<int, Access> last;  // by each other stream
    for (const Access& access : block.accesses)
      if (access.track != block.owner && host_[access.track] < access.tick) last[access.track] = access;
    for (auto& [track, access] : last) {
      if (block.recorded.count(track)) {
        waiting.until.emplace_back(track, access.tick);
      } else {
        given_back_[block.owner].push_back(std::move(access));
      }
    }
    allocated_[block.device] -= block.size;
    if (!waiting.until.empty()) waiting_.push_back(std::move(waiting));
    blocks_.erase(found);
  }

  // A kernel on a stream: all that it reads and writes.
  void kernel(int track, const std::vector<Use>& uses, const Where& where) {
    std::lock_guard<std::mutex> lock(mutex);
    uint64_t tick = launch_(track);
    ++kernels;
    for (const Use& use : uses) access_(track, tick, use, where);
  }

  void record_stream(uintptr_t at, int track) {
    std::lock_guard<std::mutex> lock(mutex);
    if (Block* block = block_of_(at)) block->recorded.insert(track);
  }

  Clock record(int track) {
    std::lock_guard<std::mutex> lock(mutex);
    launch_(track);
    return clocks_[track];
  }

  void wait(int track, const Clock& clock) {
    std::lock_guard<std::mutex> lock(mutex);
    join(clocks_[track], clock);
  }

  void synchronize(const Clock& clock) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      join(host_, clock);
    }
    host_has_waited();
  }

  void synchronize_tracks(int from, int until) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      for (int track = from; track < until; ++track) join(host_, clocks_[track]);
    }
    host_has_waited();
  }

  bool knows(const Clock& clock) {
    std::lock_guard<std::mutex> lock(mutex);
    for (int at = 0; at < TRACKS; ++at)
      if (host_[at] < clock[at]) return false;
    return true;
  }

  bool is_behind(int track, const Clock& clock) {
    std::lock_guard<std::mutex> lock(mutex);
    for (int at = 0; at < TRACKS; ++at)
      if (clocks_[track][at] < clock[at]) return false;
    return true;
  }

  void report(const std::string& what, const Where& first, const Where& second) {
    std::lock_guard<std::mutex> lock(mutex);
    report_(what, first, second);
  }

  std::vector<std::string> take_reports() {
    std::lock_guard<std::mutex> lock(mutex);
    auto taken = std::move(reports_);
    reports_.clear();
    return taken;
  }

  // Bytes that are allocated, and those freed ones that the allocator may not yet give away.
  std::pair<size_t, size_t> bytes(int device) {
    std::lock_guard<std::mutex> lock(mutex);
    settle_();
    return {allocated_[device], held_(device)};
  }

  size_t peak(int device) { return peak_[device]; }

  void reset_peak(int device) {
    std::lock_guard<std::mutex> lock(mutex);
    settle_();
    peak_[device] = allocated_[device] + held_(device);
  }

  static std::string name(int track) {
    int stream = track % STREAMS;
    std::string what = stream ? "stream " + std::to_string(stream) : "the default stream";
    return what + " of device " + std::to_string(track / STREAMS);
  }

  uint64_t kernels = 0;

 private:
  std::vector<Clock> clocks_;
  Clock host_;
  std::map<uintptr_t, Block> blocks_;
  std::vector<Waiting> waiting_;
  std::map<int, std::vector<Access>> given_back_;  // what may still use freed memory, by its owner
  std::vector<std::string> reports_;
  size_t allocated_[DEVICES] = {}, peak_[DEVICES] = {};

  uint64_t launch_(int track) {
    join(clocks_[track], host_);
    return ++clocks_[track][track];
  }

  Block* block_of_(uintptr_t at) {
    auto found = blocks_.upper_bound(at);
    if (found == blocks_.begin()) return nullptr;
    --found;
    return at < found->first + std::max<size_t>(found->second.size, 1) ? &found->second : nullptr;
  }

  void access_(int track, uint64_t tick, const Use& use, const Where& where) {
    Block* block = block_of_(use.low);
    if (block == nullptr || use.low >= use.high) return;
    const Clock& clock = clocks_[track];
    std::optional<Access> unordered;
    auto& all = block->accesses;
    size_t kept = 0;
    for (size_t at = 0; at < all.size(); ++at) {
      Access& other = all[at];
      bool overlaps = other.low < use.high && use.low < other.high;
      bool before = clock[other.track] >= other.tick;
      if (overlaps && !before && (use.writes || other.writes)) unordered = other;
      // What this access covers, and is behind, no later one needs to be compared with: who waits for this one waits
      // for that one too. A read covers reads of its own stream alone.
      bool within = use.low <= other.low && other.high <= use.high;
      bool covered = before && within && (use.writes || (!other.writes && other.track == track));
      if (!covered) {
        if (kept != at) all[kept] = std::move(other);
        ++kept;
      }
    }
    all.resize(kept);
    if (unordered)
      report_(std::string(use.writes ? "written" : "read") + " on " + name(track) + " without waiting for " +
                  (unordered->writes ? "what wrote" : "what reads") + " it on " + name(unordered->track),
              unordered->where, where);
    all.push_back({track, tick, use.writes, use.low, use.high, where});
  }

  void settle_() {
    waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(),
                                  [this](const Waiting& one) {
                                    return std::all_of(one.until.begin(), one.until.end(),
                                                       [this](auto& end) { return host_[end.first] >= end.second; });
                                  }),
                   waiting_.end());
  }

  size_t held_(int device) const {
    size_t sum = 0;
    for (const Waiting& one : waiting_)
      if (one.device == device) sum += one.size;
    return sum;
  }

  void report_(const std::string& what, const Where& first, const Where& second) {
    if (!watches) return;
    reports_.push_back(what + "\n  first " + first.kernel + first.lines + "\n  then " + second.kernel + second.lines);
  }
};

}  // namespace sim
