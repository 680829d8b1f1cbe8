// An accelerator that is not there: four devices whose memory is the host's and whose kernels are the CPU's, done at
// once. What a real one would do later is told by clocks (clocks.h), which report what was not waited for.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <chrono>
#include <memory>
#include <unordered_set>

#include "clocks.h"

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
constexpr auto SIM = DeviceType::PrivateUse1;
constexpr size_t ALIGNMENT = 512;

sim::Machine& machine() {
  static auto* one = new sim::Machine();  // never ended: tensors may outlive all else
  return *one;
}

// --- Devices and streams: what is current is a thread's own business, as on CUDA.

thread_local DeviceIndex current_device = 0;
thread_local c10::StreamId current_streams[sim::DEVICES] = {};
std::atomic<int> streams_given[sim::DEVICES];

DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current_device; }
int track_of(DeviceIndex device, c10::StreamId stream) { return device * sim::STREAMS + static_cast<int>(stream); }
int track_of(const Stream& stream) { return track_of(stream.device_index(), stream.id()); }
int current_track(DeviceIndex device) { return track_of(device, current_streams[device]); }
Stream stream_of(DeviceIndex device, c10::StreamId id) { return Stream(Stream::UNSAFE, Device(SIM, device), id); }

struct Event {
  sim::Clock clock;
  int track = -1;
  int asked = 0;
  std::chrono::steady_clock::time_point at;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return SIM; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(SIM, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < sim::DEVICES, "there is no ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return sim::DEVICES; }
  c10::DeviceCapability getDeviceCapability(Device) const override { return c10::DeviceCapability(); }

  Stream getStream(Device device) const override {
    DeviceIndex index = index_of(device);
    return stream_of(index, current_streams[index]);
  }
  Stream getDefaultStream(Device device) const override { return stream_of(index_of(device), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    DeviceIndex index = index_of(device);
    return stream_of(index, 1 + streams_given[index]++ % (sim::STREAMS - 1));
  }
  Stream getNewStream(Device device, int) const override { return getStreamFromGlobalPool(device, false); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override {
    synchronizeStream(stream);  // the slowest answer would be no, for ever; yes is a wait
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    int track = track_of(stream);
    machine().synchronize_tracks(track, track + 1);
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    DeviceIndex index = device < 0 ? current_device : device;
    machine().synchronize_tracks(index * sim::STREAMS, (index + 1) * sim::STREAMS);
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    auto* one = static_cast<Event*>(*event);
    one->track = track_of(stream);
    one->clock = machine().record(one->track);
    one->asked = 0;
    one->at = std::chrono::steady_clock::now();
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) machine().wait(track_of(stream), static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    auto* one = static_cast<Event*>(event);
    if (machine().knows(one->clock)) return true;
    if (one->asked++ == 0) return false;  // as late as it may be, but not for ever
    machine().synchronize(one->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) machine().synchronize(static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    auto *from = static_cast<Event*>(first), *until = static_cast<Event*>(second);
    TORCH_CHECK(from && until, "both events must have been recorded");
    TORCH_CHECK(machine().knows(from->clock) && machine().knows(until->clock), "both events must be completed");
    return std::chrono::duration<double, std::milli>(until->at - from->at).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    machine().record_stream(reinterpret_cast<uintptr_t>(data.get()), track_of(stream));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// --- Where a kernel was called from.

// The innermost Python lines. Taken without the machine's lock, since it waits for the interpreter's.
std::string python_lines() {
  if (!machine().watches || !Py_IsInitialized()) return "";
  py::gil_scoped_acquire gil;
  std::string lines;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  for (int depth = 0; frame != nullptr && depth < 40; ++depth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    std::string file = PyUnicode_AsUTF8(code->co_filename);
    if (file.find("/torch/") == std::string::npos)
      lines += "\n    " + file.substr(file.rfind("/", file.rfind('/') - 1) + 1) + ":" +
               std::to_string(PyFrame_GetLineNumber(frame)) + " " + PyUnicode_AsUTF8(code->co_qualname);
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return lines;
}

sim::Where here(std::string kernel) { return {std::move(kernel), python_lines()}; }

// --- Memory.

struct DeviceMemory final : c10::DeviceAllocator {
  static void release(void* data) {
    machine().free(reinterpret_cast<uintptr_t>(data));
    std::free(data);
  }
  c10::DataPtr allocate(size_t size) override {
    Device device(SIM, current_device);
    if (size == 0) return {nullptr, nullptr, &release, device};
    size_t rounded = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    void* data = std::aligned_alloc(ALIGNMENT, rounded);
    TORCH_CHECK(data != nullptr, "out of memory: ", size, " bytes on ", device);
    machine().allocate(reinterpret_cast<uintptr_t>(data), rounded, device.index(), current_track(device.index()),
                       here("allocate"));
    return {data, data, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    machine().record_stream(reinterpret_cast<uintptr_t>(data.get()), track_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto [allocated, held] = machine().bytes(device);
    auto set = [](auto& all, int64_t current, int64_t peak) {
      all[0].current = current;
      all[0].peak = peak;
    };
    set(stats.allocated_bytes, allocated, machine().peak(device));
    set(stats.active_bytes, allocated + held, machine().peak(device));
    set(stats.reserved_bytes, allocated + held, machine().peak(device));
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { machine().reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    constexpr size_t TOTAL = size_t{8} << 30;
    return {TOTAL - machine().bytes(device).first, TOTAL};
  }
};
DeviceMemory device_memory;
REGISTER_ALLOCATOR(SIM, &device_memory);

struct PinnedMemory final : c10::Allocator {
  std::mutex mutex;
  std::unordered_set<const void*> pinned;
  static PinnedMemory& one() {
    static auto* memory = new PinnedMemory();
    return *memory;
  }
  static void release(void* data) {
    {
      std::lock_guard<std::mutex> lock(one().mutex);
      one().pinned.erase(data);
    }
    std::free(data);
  }
  c10::DataPtr allocate(size_t size) override {
    void* data = std::aligned_alloc(64, (std::max<size_t>(size, 1) + 63) / 64 * 64);
    std::lock_guard<std::mutex> lock(mutex);
    pinned.insert(data);
    return {data, data, &release, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
  bool holds(const void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    return pinned.count(data) > 0;
  }
};

// --- Random numbers: each device's generator is one of the CPU's.

struct SimGenerator final : c10::GeneratorImpl {
  at::Generator inner;
  static DeviceType device_type() { return SIM; }
  explicit SimGenerator(DeviceIndex device, at::Generator of = at::detail::createCPUGenerator())
      : GeneratorImpl(Device(SIM, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(of)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "this generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "this generator has no offset"); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    inner = static_cast<SimGenerator*>(other.get())->inner;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::make_intrusive<SimGenerator>(device_.index(), inner);
  }
  SimGenerator* clone_impl() const override { return new SimGenerator(device_.index(), inner.clone()); }
};

at::Generator& default_generator(DeviceIndex device) {
  static std::vector<at::Generator>* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (DeviceIndex at = 0; at < sim::DEVICES; ++at) made->push_back(at::make_generator<SimGenerator>(at));
    return made;
  }();
  return all->at(device < 0 ? current_device : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return sim::DEVICES; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice(Device(SIM, device)); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice(Device(SIM, device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<SimGenerator>(device < 0 ? current_device : device);
  }
  Device getDeviceFromPtr(void*) const override { return Device(SIM, current_device); }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::one().holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::one(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    c10::DataPtr data = device_memory.allocate(size);
    if (storage.data() != nullptr) std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(size);
  }
};
struct Registered {
  Registered() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }
} registered;

// --- Kernels: those of the CPU, on the same memory.

bool is_sim(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == SIM; }

sim::Use use_of(const Tensor& tensor, bool writes) {
  auto low = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  uint64_t last = 0;
  for (int64_t at = 0; at < tensor.dim(); ++at) last += (tensor.size(at) - 1) * tensor.stride(at);
  return {low, tensor.numel() ? low + (last + 1) * tensor.itemsize() : low, writes};
}

Tensor on_cpu(const Tensor& tensor) {  // the same memory
  auto options = tensor.options().device(at::kCPU).pinned_memory(false);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

Tensor empty_like_on(const Tensor& like, DeviceIndex device) {
  auto options = like.options().device(Device(SIM, device)).pinned_memory(false);
  return like.is_non_overlapping_and_dense() ? at::empty_strided(like.sizes(), like.strides(), options)
                                             : at::empty(like.sizes(), options);
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t bytes = (tensor->storage_offset() + tensor->numel()) * tensor->itemsize();
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

const std::unordered_set<std::string> WRITES_RUNNING{"aten::native_batch_norm", "aten::_batch_norm_impl_index"};
const std::unordered_set<std::string> TAKES_CPU{"aten::index", "aten::index_put_", "aten::_index_put_impl_",
                                                "aten::index_put", "aten::_unsafe_index"};

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  const auto& arguments = schema.arguments();
  const size_t begin = stack->size() - arguments.size();
  DeviceIndex device = -1;
  std::vector<sim::Use> uses;
  std::vector<std::pair<Tensor, Tensor>> pairs;  // (of the device, the same memory on the CPU)
  bool strange = false;

  auto bring = [&](const Tensor& tensor, bool writes, bool is_out = false) -> Tensor {
    if (!tensor.defined()) return tensor;
    if (!is_sim(tensor)) {
      strange |= tensor.dim() > 0 && tensor.device().type() == at::kCPU;
      return tensor;
    }
    TORCH_CHECK(device < 0 || device == tensor.device().index(), name, ": expected all tensors to be on the same ",
                "device, and they are on ", device, " and ", tensor.device().index());
    device = tensor.device().index();
    if (tensor.numel()) uses.push_back(use_of(tensor, writes));
    // an output is resized by the CPU's kernel: from nothing, which it does without a warning
    pairs.emplace_back(tensor, is_out ? at::empty({0}, tensor.options().device(at::kCPU)) : on_cpu(tensor));
    return pairs.back().second;
  };

  bool has_generator = false;
  for (size_t at = 0; at < arguments.size(); ++at) {
    auto& value = (*stack)[begin + at];
    const auto& argument = arguments[at];
    bool running = WRITES_RUNNING.count(name) && argument.name().rfind("running_", 0) == 0;
    bool writes = running || (argument.alias_info() != nullptr && argument.alias_info()->isWrite());
    if (value.isTensor()) {
      value = bring(value.toTensor(), writes, argument.is_out());
    } else if (value.isTensorList()) {
      c10::List<Tensor> brought;
      for (const Tensor& one : value.toTensorVector()) brought.push_back(bring(one, writes));
      value = std::move(brought);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> brought;
      for (const std::optional<Tensor>& one : value.toOptionalTensorList())
        brought.push_back(one ? std::optional<Tensor>(bring(*one, writes)) : std::nullopt);
      value = std::move(brought);
    } else if (value.isDevice()) {
      if (value.toDevice().type() == SIM) device = index_of(value.toDevice());
      value = Device(at::kCPU);
    }
  }
  TORCH_CHECK(device >= 0, name, " has no tensor on a device");
  TORCH_CHECK(!strange || TAKES_CPU.count(name), name, ": expected all tensors to be on the same device, and one is ",
              "on the CPU");
  for (size_t at = 0; at < arguments.size(); ++at) {
    auto& value = (*stack)[begin + at];
    if (arguments[at].name() != "generator") continue;
    has_generator = true;
    at::Generator given = value.isGenerator() ? value.toGenerator() : default_generator(device);
    if (given.device().type() == SIM) value = at::check_generator<SimGenerator>(given)->inner;
  }

  c10::DeviceGuard guard(Device(SIM, device));
  machine().kernel(current_track(device), uses, here(name));
  bool draws = !has_generator && op.hasTag(at::Tag::nondeterministic_seeded);
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  Tensor before;
  static std::mutex lent;
  std::unique_lock<std::mutex> lending(lent, std::defer_lock);
  if (draws) {  // of the CPU's generator, which is lent the device's state
    lending.lock();
    before = cpu.get_state();
    cpu.set_state(default_generator(device).get_state());
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (draws) {
    default_generator(device).set_state(cpu.get_state());
    cpu.set_state(before);
    lending.unlock();
  }

  bool waits = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  std::vector<sim::Use> made;
  auto give = [&](const Tensor& tensor) -> Tensor {
    if (!tensor.defined()) return tensor;
    for (auto& [original, alias] : pairs) {
      if (!tensor.is_same(alias)) continue;
      if (original.const_data_ptr() != alias.const_data_ptr()) {  // an output
        if (original.sizes() != alias.sizes()) resize(original, c10::fromIntArrayRefSlow(alias.sizes()), {});
        if (original.numel()) {
          on_cpu(original).copy_(alias);
          made.push_back(use_of(original, true));
        }
      }
      return original;
    }
    Tensor result = empty_like_on(tensor, device);
    if (result.numel()) {
      on_cpu(result).copy_(tensor);
      made.push_back(use_of(result, true));
    }
    return result;
  };
  const size_t first = stack->size() - schema.returns().size();
  for (size_t at = 0; at < schema.returns().size(); ++at) {
    auto& value = (*stack)[first + at];
    const auto* alias = schema.returns()[at].alias_info();
    TORCH_CHECK(alias == nullptr || alias->isWrite(), name, " gives a view, which a kernel of the CPU cannot");
    if (value.isTensor()) {
      value = give(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> given;
      for (const Tensor& one : value.toTensorVector()) given.push_back(give(one));
      value = std::move(given);
    } else {
      waits = true;  // a number, which the host has read
    }
  }
  if (!made.empty()) machine().kernel(current_track(device), made, here(name));
  if (waits) Guard().synchronizeStream(Guard().getStream(Device(SIM, device)));
}

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) { run(op, stack); }

// Convolutions come by names of their own to devices that are not torch's.
void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static auto plain = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run(plain, stack);
}

void convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static auto plain = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  auto first = stack->end() - op.schema().arguments().size();
  Tensor weight = (first + 2)->toTensor();
  int64_t outputs = (first + 6)->toBool() ? weight.size(1) * (first + 8)->toInt() : weight.size(0);
  stack->insert(first + 3, c10::IValue(std::vector<int64_t>{outputs}));
  run(plain, stack);
}

// Copies to and from pinned memory of the host, which are under way until the host has waited for them: what arrives is
// there then, and what leaves must be as it was.
struct HostCopy {
  sim::Clock over;
  Tensor host, image;
  bool arrives;
  sim::Where where;
};
std::mutex host_copies_mutex;
std::vector<HostCopy> host_copies;

bool is_written(const HostCopy& left) {
  auto bytes = [](const Tensor& tensor) { return tensor.reshape(-1).view(at::kByte); };
  return !at::equal(bytes(on_cpu(left.host)), bytes(left.image));
}

void report_written(const std::vector<HostCopy>& written, const std::string& noticed) {
  for (const HostCopy& one : written)
    machine().report("pinned memory was written while a copy of it was under way", one.where, here(noticed));
}

void begin_host_copy(int track, const Tensor& host, Tensor image, bool arrives, const sim::Where& where) {
  at::AutoDispatchBelowADInplaceOrView plain;
  std::vector<HostCopy> written;
  {
    std::lock_guard<std::mutex> lock(host_copies_mutex);
    if (arrives) {  // Copies from this memory that the stream is behind are over before this one writes there.
      auto first = std::stable_partition(host_copies.begin(), host_copies.end(), [&](const HostCopy& one) {
        bool same = one.host.storage().data() == host.storage().data();
        return one.arrives || !same || !machine().is_behind(track, one.over);
      });
      std::copy_if(first, host_copies.end(), std::back_inserter(written), is_written);
      host_copies.erase(first, host_copies.end());
      on_cpu(host).fill_(77);
    }
    host_copies.push_back({machine().record(track), host, std::move(image), arrives, where});
  }
  report_written(written, "copy");
}

// What a copy on a stream reads from pinned memory: what the last copy into it brings, behind which the stream must be.
Tensor read_from_host(int track, const Tensor& host, const sim::Where& where) {
  std::lock_guard<std::mutex> lock(host_copies_mutex);
  for (auto one = host_copies.rbegin(); one != host_copies.rend(); ++one) {
    if (!one->arrives || one->host.storage().data() != host.storage().data()) continue;
    if (!machine().is_behind(track, one->over))
      machine().report("pinned memory is read on " + machine().name(track) + " while a copy into it is under way",
                       one->where, where);
    else if (one->host.is_same_size(host) && one->host.data_ptr() == host.data_ptr())
      return one->image;
  }
  return host;
}

void end_host_copies() {
  at::AutoDispatchBelowADInplaceOrView plain;
  std::vector<HostCopy> written;
  {
    std::lock_guard<std::mutex> lock(host_copies_mutex);  // held until all are seen: another thread may write then
    auto first = std::stable_partition(host_copies.begin(), host_copies.end(),
                                       [](const HostCopy& one) { return !machine().knows(one.over); });
    for (auto one = first; one != host_copies.end(); ++one) {
      if (one->arrives)
        on_cpu(one->host).copy_(one->image);
      else if (is_written(*one))
        written.push_back(*one);
    }
    host_copies.erase(first, host_copies.end());
  }
  report_written(written, "the host waits");
}

// A copy between devices runs on the source's current stream, behind what the target's has begun, and before what it
// begins later, as CUDA's does. Between host and device it runs on the device's; the host waits for it, unless it is
// told not to and its own memory is pinned.
Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  if (self.numel() == 0) return to;
  Tensor from = is_sim(self) ? on_cpu(self) : self, into = is_sim(to) ? on_cpu(to) : to;
  sim::Where where = here("copy");
  Guard guard;
  if (is_sim(self) && is_sim(to)) {
    int source = current_track(self.device().index()), target = current_track(to.device().index());
    if (source != target) machine().wait(source, machine().record(target));
    machine().kernel(source, {use_of(self, false), use_of(to, true)}, where);
    if (source != target) machine().wait(target, machine().record(source));
    into.copy_(from);
    return to;
  }
  const Tensor& there = is_sim(self) ? self : to;
  const Tensor& host = is_sim(self) ? to : self;
  Device device = there.device();
  machine().kernel(current_track(device.index()), {use_of(there, is_sim(to))}, where);
  if (non_blocking && PinnedMemory::one().holds(host.storage().data())) {
    int track = current_track(device.index());
    if (is_sim(to)) from = read_from_host(track, host, where);
    begin_host_copy(track, host, from.clone(), is_sim(self), where);
    if (is_sim(to)) into.copy_(from);
    return to;
  }
  into.copy_(from);
  guard.synchronizeStream(guard.getStream(device));
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  at::native::resize_output(to, self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar(const Tensor& self) {
  machine().kernel(current_track(self.device().index()), {use_of(self, false)}, here("item"));
  Guard().synchronizeStream(Guard().getStream(self.device()));
  return at::_local_scalar_dense(on_cpu(self));
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(SIM)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(SIM)));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at;
  if (offset) at = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(source));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  auto at = offset.guard_int(__FILE__, __LINE__);
  if (stride.empty() && !size.empty()) {
    tensor->set_storage_offset(at);
    tensor->set_sizes_contiguous(sizes);
  } else {
    tensor->set_sizes_and_strides(sizes, strides, at);
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, c10::SymIntArrayRef({c10::SymInt(count)}), {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

Tensor& set_nothing(Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, &device_memory, true);
  return set_storage(self, std::move(storage), 0, c10::SymIntArrayRef({c10::SymInt(0)}), {});
}

void record_stream(Tensor& self, Stream stream) { device_memory.recordStream(self.storage().data_ptr(), stream); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_nothing);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // named so by torch's macros
  using at::autocast::CastPolicy;
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss, fp32)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "What the simulated accelerator has seen.";
  machine().host_has_waited = end_host_copies;
  module.attr("DEVICES") = sim::DEVICES;
  module.def("take_reports", [] { return machine().take_reports(); });
  module.def("watch", [](bool watches) { machine().watches = watches; });
  module.def("kernels", [] { return machine().kernels; });
  module.def("default_generator", [](int device) { return default_generator(device); });
  module.def("reset_peak", [](int device) { machine().reset_peak(device); });
  module.def("peak_bytes", [](int device) { return machine().peak(device); });
}
