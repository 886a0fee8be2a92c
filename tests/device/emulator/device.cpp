// An emulated accelerator: torch's PrivateUse1, on memory that is mapped twice. Tensors' addresses
// are in the mapping that the host cannot access; the CPU's kernels use the second mapping.
// Environment: EMU_DEVICES, EMU_DEVICE_MIB, EMU_LAZY=0 (queued work runs immediately), EMU_POISON=0
// (fresh and freed memory keeps its values).
#include "device.h"
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/Stream.h>
#include <c10/core/Event.h>
#include <torch/library.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/autograd/variable.h>
#include <sys/mman.h>
#include <unistd.h>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>

namespace emu {
constexpr auto P1 = c10::DeviceType::PrivateUse1;
using c10::DeviceIndex;

static int64_t env(const char* name, int64_t fallback) {
  const char* value = std::getenv(name);
  return value && *value ? std::strtoll(value, nullptr, 10) : fallback;
}
static const int NUM_DEVICES = env("EMU_DEVICES", 2);
static const size_t DEVICE_BYTES = size_t(env("EMU_DEVICE_MIB", 8192)) << 20;
static const bool LAZY = env("EMU_LAZY", 1);      // side streams run as late as possible
static const bool POISON = env("EMU_POISON", 1);  // fresh and freed device memory is NaN
static std::recursive_mutex G;
static pid_t owner = 0;
static char *device_base = nullptr, *host_base = nullptr;

static void start() {
  if (owner) { TORCH_CHECK(owner == getpid(), "Cannot re-initialize the device in a forked subprocess."); return; }
  std::lock_guard<std::recursive_mutex> lock(G);
  if (owner) return;
  size_t total = DEVICE_BYTES * NUM_DEVICES;
  int fd = memfd_create("emulated_device", MFD_CLOEXEC);
  TORCH_CHECK(fd >= 0 && ftruncate(fd, total) == 0, "no memory for the emulated device");
  host_base = (char*)mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  device_base = (char*)mmap(nullptr, total, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  TORCH_CHECK(host_base != MAP_FAILED && device_base != MAP_FAILED, "mmap failed");
  close(fd);
  owner = getpid();
}
static bool in_device(const void* p) { return device_base && p >= device_base && p < device_base + DEVICE_BYTES * NUM_DEVICES; }
static bool in_host(const void* p) { return host_base && p >= host_base && p < host_base + DEVICE_BYTES * NUM_DEVICES; }
static char* to_host(const void* p) {
  if (!p) return nullptr;
  TORCH_CHECK(in_device(p), "a tensor of the emulated device whose memory is not the device's");
  return host_base + ((const char*)p - device_base);
}

// ---------------------------------------------------------------- instrumentation
static std::atomic<bool> watching{false};
static py::object* hook = nullptr;
void note(const char* kind, int64_t bytes, bool pinned, int64_t stream, int device) {
  if (!watching || !Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  if (!hook) return;
  try { (*hook)(kind, bytes, pinned, stream, device); } catch (py::error_already_set& e) { e.discard_as_unraisable("emu hook"); }
}

// ---------------------------------------------------------------- streams and events
struct Queue { std::deque<std::function<void()>> work; uint64_t asked = 0, done = 0; int queries = 0; };
static std::map<std::pair<int, int64_t>, Queue> queues;  // (device, stream)
static std::atomic<int64_t> next_stream{1};
static thread_local int current_device = 0;
static thread_local std::map<int, int64_t> current_stream;
static int64_t stream_of(int device) { auto at = current_stream.find(device); return at == current_stream.end() ? 0 : at->second; }
static bool drain(int device, int64_t stream, uint64_t upto = UINT64_MAX) {
  std::lock_guard<std::recursive_mutex> lock(G);
  auto& q = queues[{device, stream}];
  bool any = false;
  while (!q.work.empty() && q.done < upto) {
    auto item = std::move(q.work.front());
    q.work.pop_front();
    item();
    ++q.done;
    any = true;
  }
  q.queries = 0;
  return any;
}
static void enqueue(int device, int64_t stream, std::function<void()> item) {
  std::lock_guard<std::recursive_mutex> lock(G);
  auto& q = queues[{device, stream}];
  q.work.push_back(std::move(item));
  ++q.asked;
  if (!LAZY) drain(device, stream);
}
static void drain_device(int device) {
  std::lock_guard<std::recursive_mutex> lock(G);
  std::vector<int64_t> ids;
  for (auto& [key, q] : queues) if (key.first == device) ids.push_back(key.second);
  for (auto id : ids) drain(device, id);
}
void drain_current(DeviceIndex device) { drain(device, stream_of(device)); }

struct Mark { int device; int64_t stream; uint64_t at; double when; int queries; };
static double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return P1; }
  static int index(c10::Device d) { return d.index() < 0 ? current_device : d.index(); }
  c10::Device exchangeDevice(c10::Device d) const override { auto old = getDevice(); setDevice(d); return old; }
  c10::Device getDevice() const override { return {P1, (DeviceIndex)current_device}; }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() < NUM_DEVICES, "invalid device ordinal ", int(d.index()));
    if (d.index() >= 0) current_device = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override { if (d.index() >= 0) current_device = d.index(); }
  c10::Stream make(int device, int64_t id) const { return c10::Stream(c10::Stream::UNSAFE, {P1, (DeviceIndex)device}, id); }
  c10::Stream getStream(c10::Device d) const override { return make(index(d), stream_of(index(d))); }
  c10::Stream getDefaultStream(c10::Device d) const override { return make(index(d), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return make(index(d), next_stream++); }
  c10::Stream getNewStream(c10::Device d, int) const override { return make(index(d), next_stream++); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    current_stream[index(s.device())] = s.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return (void*)s.id(); }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete (Mark*)e; }
  void record(void** e, const c10::Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> lock(G);
    if (!*e) *e = new Mark;
    int device = index(s.device());
    // Reached at the first wait for it, or when a later kernel runs on this stream.
    enqueue(device, s.id(), [] {});
    *(Mark*)*e = {device, s.id(), queues[{device, s.id()}].asked, seconds(), 0};
  }
  static bool reached(const Mark& m) { std::lock_guard<std::recursive_mutex> lock(G); return queues[{m.device, m.stream}].done >= m.at; }
  void block(void* e, const c10::Stream& s) const override {
    if (!e) return;
    auto m = *(Mark*)e;
    if (reached(m) || (m.device == index(s.device()) && m.stream == s.id())) return;
    enqueue(index(s.device()), s.id(), [m] { drain(m.device, m.stream, m.at); });
  }
  bool queryEvent(void* e) const override {
    if (!e) return true;
    auto& m = *(Mark*)e;
    if (!reached(m) && ++m.queries >= 3) drain(m.device, m.stream, m.at);
    return reached(m);
  }
  void synchronizeEvent(void* e) const override {
    if (!e) return;
    auto& m = *(Mark*)e;
    note("event_synchronize", 0, false, m.stream, m.device);
    drain(m.device, m.stream, m.at);
  }
  bool queryStream(const c10::Stream& s) const override {
    std::lock_guard<std::recursive_mutex> lock(G);
    auto& q = queues[{index(s.device()), s.id()}];
    if (!q.work.empty() && ++q.queries >= 3) drain(index(s.device()), s.id());
    return q.work.empty();
  }
  void synchronizeStream(const c10::Stream& s) const override {
    note("stream_synchronize", 0, false, s.id(), index(s.device()));
    drain(index(s.device()), s.id());
  }
  void synchronizeDevice(const DeviceIndex d) const override {
    int device = d < 0 ? current_device : d;
    note("device_synchronize", 0, false, -1, device);
    drain_device(device);
  }
  DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override;
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    TORCH_CHECK(a && b, "both events must be recorded before elapsed_time");
    TORCH_CHECK(reached(*(Mark*)a) && reached(*(Mark*)b), "device not ready: an event of elapsed_time has not been reached");
    return (((Mark*)b)->when - ((Mark*)a)->when) * 1e3;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---------------------------------------------------------------- memory
struct Block { size_t bytes; int device; int64_t stream; std::set<int64_t> others; };
struct Pool { std::map<size_t, size_t> free; c10::CachingDeviceAllocator::DeviceStats stats; };
static std::map<char*, Block> blocks;
static std::vector<Pool> pools;
static void release(char* p, const Block& b) {
  std::lock_guard<std::recursive_mutex> lock(G);
  if (POISON) memset(to_host(p), 0xFF, b.bytes);
  auto& free = pools[b.device].free;
  size_t at = p - device_base, size = b.bytes;
  auto next = free.lower_bound(at);
  if (next != free.end() && at + size == next->first) { size += next->second; next = free.erase(next); }
  if (next != free.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == at) { before->second += size; return; }
  }
  free[at] = size;
}
static void count(int device, int64_t bytes) {
  auto& s = pools[device].stats;
  auto one = [&](auto& array, int64_t n) { auto& stat = array[0]; n > 0 ? stat.increase(n) : stat.decrease(-n); };
  one(s.allocated_bytes, bytes); one(s.reserved_bytes, bytes); one(s.active_bytes, bytes); one(s.requested_bytes, bytes);
  one(s.allocation, bytes > 0 ? 1 : -1);
}
struct Allocator final : c10::DeviceAllocator {
  static void gone(void* ctx) {
    if (!ctx || owner != getpid()) return;
    std::lock_guard<std::recursive_mutex> lock(G);
    auto at = blocks.find((char*)ctx);
    if (at == blocks.end()) return;
    auto b = at->second;
    blocks.erase(at);
    count(b.device, -int64_t(b.bytes));
    char* p = (char*)ctx;
    // The memory is freed after the work that is queued on the block's own stream. That work runs
    // now, so work on other streams comes too late, unless record_stream named these streams.
    drain(b.device, b.stream);
    auto left = std::make_shared<int>(1);
    auto one_done = [left, p, b] { if (--*left == 0) release(p, b); };
    for (auto stream : b.others)
      if (!queues[{b.device, stream}].work.empty()) { ++*left; enqueue(b.device, stream, one_done); }
    one_done();
  }
  c10::DataPtr make(size_t bytes, int device) {
    start();
    std::lock_guard<std::recursive_mutex> lock(G);
    if (pools.empty()) { pools.resize(NUM_DEVICES); for (int i = 0; i < NUM_DEVICES; i++) pools[i].free[i * DEVICE_BYTES] = DEVICE_BYTES; }
    c10::Device d(P1, device);
    if (bytes == 0) return {nullptr, nullptr, &gone, d};
    size_t size = (bytes + 511) / 512 * 512;
    auto& free = pools[device].free;
    for (auto at = free.begin(); at != free.end(); ++at) {
      if (at->second < size) continue;
      size_t offset = at->first, rest = at->second - size;
      free.erase(at);
      if (rest) free[offset + size] = rest;
      char* p = device_base + offset;
      blocks[p] = {size, device, stream_of(device), {}};
      count(device, size);
      if (POISON) memset(to_host(p), 0xFF, size);
      return {p, p, &gone, d};
    }
    TORCH_CHECK_WITH(OutOfMemoryError, false, "the emulated device ", device, " is out of memory: asked for ", bytes);
  }
  c10::DataPtr allocate(size_t bytes) override { return make(bytes, current_device); }
  c10::DeleterFnPtr raw_deleter() const override { return &gone; }
  void copy_data(void* to, const void* from, std::size_t n) const override { memcpy(to_host(to), to_host(from), n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& ptr, c10::Stream s) override {
    std::lock_guard<std::recursive_mutex> lock(G);
    auto at = blocks.find((char*)ptr.get_context());
    if (at != blocks.end()) at->second.others.insert(s.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override { make(0, d); return pools[d].stats; }
  void resetAccumulatedStats(DeviceIndex d) override { make(0, d); each(d, [](auto& stat) { stat.reset_accumulated(); }); }
  void resetPeakStats(DeviceIndex d) override { make(0, d); each(d, [](auto& stat) { stat.reset_peak(); }); }
  template <class F> void each(int d, F f) {
    auto& s = pools[d].stats;
    for (auto* a : {&s.allocated_bytes, &s.reserved_bytes, &s.active_bytes, &s.requested_bytes, &s.allocation}) f((*a)[0]);
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {
    make(0, d);
    size_t left = 0;
    for (auto& [_, n] : pools[d].free) left += n;
    return {left, DEVICE_BYTES};
  }
};
static Allocator allocator;
REGISTER_ALLOCATOR(P1, &allocator);
void Guard::recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const { allocator.recordStream(p, s); }

static std::map<char*, size_t> pinned;
struct PinnedAllocator final : at::HostAllocator {
  static void gone(void* p) { std::lock_guard<std::recursive_mutex> lock(G); pinned.erase((char*)p); std::free(p); }
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &gone, c10::Device(c10::DeviceType::CPU)};
    char* p = (char*)std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    std::lock_guard<std::recursive_mutex> lock(G);
    pinned[p] = bytes;
    return {p, p, &gone, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &gone; }
  void copy_data(void* to, const void* from, std::size_t n) const override { memcpy(to, from, n); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
static PinnedAllocator pinned_allocator;
static bool is_pinned(const void* p) {
  std::lock_guard<std::recursive_mutex> lock(G);
  auto at = pinned.upper_bound((char*)p);
  if (at == pinned.begin()) return false;
  --at;
  return p < at->first + at->second;
}

// ---------------------------------------------------------------- random numbers, as on CUDA
// The state is (seed, offset).
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = 67280421310721, offset_ = 0;
  explicit Generator(DeviceIndex d) : c10::GeneratorImpl({P1, d}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed; offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { set_current_seed(std::chrono::steady_clock::now().time_since_epoch().count()); return seed_; }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device().is_cpu() && state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(), "RNG state is wrong");
    memcpy(&seed_, state.data(), 8);
    memcpy(&offset_, (const char*)state.data() + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    memcpy(state.data_ptr(), &seed_, 8);
    memcpy((char*)state.data_ptr() + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  c10::GeneratorImpl* clone_impl() const override { auto* g = new Generator(device_.index()); g->seed_ = seed_; g->offset_ = offset_; return g; }
  at::Generator next() {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t mixed = (seed_ ^ (offset_ * 0x9E3779B97F4A7C15ull)) * 0xBF58476D1CE4E5B9ull;
    offset_ += 4;
    return at::detail::createCPUGenerator(mixed ^ (mixed >> 31));
  }
};
static std::vector<at::Generator>& generators() {
  static std::vector<at::Generator> all = [] { std::vector<at::Generator> v; for (int i = 0; i < NUM_DEVICES; i++) v.push_back(at::make_generator<Generator>(i)); return v; }();
  return all;
}
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return NUM_DEVICES > 0; }
  DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  void setCurrentDevice(DeviceIndex d) const override { Guard().setDevice({P1, d}); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { auto old = current_device; Guard().setDevice({P1, d}); return old; }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool hasPrimaryContext(DeviceIndex) const override { return owner == getpid(); }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return generators()[d < 0 ? current_device : d]; }
  at::Generator getNewGenerator(DeviceIndex d) const override { return at::make_generator<Generator>(d < 0 ? current_device : d); }
  at::Device getDeviceFromPtr(void* p) const override { return {P1, DeviceIndex(((char*)p - device_base) / DEVICE_BYTES)}; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t bytes) const override {
    drain_current(s.device().index());
    auto fresh = allocator.make(bytes, s.device().index());
    if (auto n = std::min(bytes, s.nbytes())) memcpy(to_host(fresh.get()), to_host(s.data()), n);
    s.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    s.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// ---------------------------------------------------------------- kernels
// They are the CPU's, on the memory itself.
bool is_device(const at::Tensor& t) { return t.defined() && t.device().type() == P1; }
static at::Tensor over(void* p, size_t bytes, const at::Tensor& like) {
  c10::Storage s(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(p, c10::Device(c10::DeviceType::CPU)), c10::GetCPUAllocator(), true);
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(s), c10::DispatchKeySet(c10::DispatchKey::CPU), like.dtype());
  t.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return t;
}
at::Tensor mem(const at::Tensor& t) {
  TORCH_CHECK(is_device(t), "expected a tensor of the emulated device, got one on ", t.device());
  start();
  return over(to_host(t.storage().data()), t.storage().nbytes(), t);
}
static void give_back(const at::Tensor& cpu, const at::Tensor& t) {
  auto* impl = t.unsafeGetTensorImpl();
  if (cpu.storage().data() != (void*)to_host(t.storage().data())) {  // the kernel has resized it
    auto fresh = allocator.make(cpu.storage().nbytes(), t.device().index());
    if (cpu.storage().nbytes()) memcpy(to_host(fresh.get()), cpu.storage().data(), cpu.storage().nbytes());
    t.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    t.storage().unsafeGetStorageImpl()->set_nbytes(cpu.storage().nbytes());
  }
  if (cpu.sizes() != t.sizes() || cpu.strides() != t.strides() || cpu.storage_offset() != t.storage_offset()) {
    impl->set_storage_offset(cpu.storage_offset());
    impl->set_sizes_and_strides(cpu.sizes(), cpu.strides());
  }
}
static at::Tensor on_device(const at::Tensor& cpu, c10::Storage storage, int device) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), cpu.dtype());
  t.unsafeGetTensorImpl()->set_storage_offset(cpu.storage_offset());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides());
  return t;
}
struct Call {
  std::vector<std::pair<at::Tensor, at::Tensor>> seen;  // (over the memory, the device's)
  int device = -1;
  bool may_mix;
  std::string name;
  at::Tensor in(const at::Tensor& t) {
    if (!t.defined()) return t;
    if (!is_device(t)) {
      TORCH_CHECK(t.dim() == 0 || may_mix || !t.device().is_cpu() || t.numel() == 0, "Expected all tensors to be on the same device (", name, "), found a CPU tensor of size ", t.sizes());
      if (t.dim() != 0) note("h2d_index", t.nbytes(), false, -1, -1);
      return t;
    }
    TORCH_CHECK(device < 0 || device == t.device().index(), "Expected all tensors to be on the same device (", name, "), found two devices");
    if (device < 0) { device = t.device().index(); drain_current(device); }
    for (auto& [cpu, mine] : seen) if (mine.is_same(t)) return cpu;
    seen.emplace_back(mem(t), t);
    return seen.back().first;
  }
  at::Tensor out(const at::Tensor& t) {
    if (!t.defined() || device < 0 || is_device(t)) return t;
    for (auto& [cpu, mine] : seen) if (cpu.is_same(t)) return mine;
    const void* p = t.storage().data();
    if (in_host(p))
      for (auto& [cpu, mine] : seen)
        if (cpu.storage().data() == p) return on_device(t, c10::Storage(mine.storage()), device);
    size_t bytes = t.storage().nbytes();
    c10::Storage s(c10::Storage::use_byte_size_t(), bytes, allocator.make(bytes, device), &allocator, true);
    if (bytes) memcpy(to_host(s.data()), p, bytes);
    return on_device(t, std::move(s), device);
  }
};
static const std::set<std::string> MIXES = {"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_unsafe_index.Tensor", "aten::index.Tensor_out", "aten::_unsafe_index_put"};
static std::atomic<int64_t> num_kernels{0};

static void kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t n = schema.arguments().size(), base = stack->size() - n;
  std::string name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  Call call;
  call.name = name;
  call.may_mix = MIXES.count(name) || MIXES.count(schema.name());
  ++num_kernels;
  for (size_t i = 0; i < n; i++) {
    auto& v = (*stack)[base + i];
    if (v.isTensor()) v = call.in(v.toTensor());
    else if (v.isTensorList()) { auto list = v.toTensorVector(); for (auto& t : list) t = call.in(t); v = c10::IValue(list); }
    else if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& item : v.toOptionalTensorVector()) list.push_back(item.has_value() ? std::optional<at::Tensor>(call.in(*item)) : std::nullopt);
      v = c10::IValue(list);
    } else if (v.isDevice() && v.toDevice().type() == P1) {
      call.device = Guard::index(v.toDevice());
      v = c10::Device(c10::DeviceType::CPU);
    }
  }
  if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output))
    note(("op:" + name).c_str(), 0, false, call.device < 0 ? 0 : stream_of(call.device), call.device);
  auto run = [&] { op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack); };
  if (op.hasTag(at::Tag::nondeterministic_seeded) && call.device >= 0) {
    bool has_argument = false;
    auto next = [&](int d) { return generators()[d].get<Generator>()->next(); };
    for (size_t i = 0; i < n; i++) {
      auto& v = (*stack)[base + i];
      if (v.isGenerator()) { v = v.toGenerator().get<Generator>()->next(); has_argument = true; }
      else if (v.isNone() && schema.arguments()[i].name() == "generator") { v = next(call.device); has_argument = true; }
    }
    if (has_argument) run();
    else {
      auto ordinary = at::detail::getDefaultCPUGenerator();
      auto before = ordinary.get_state();
      ordinary.set_state(next(call.device).get_state());
      try { run(); } catch (...) { ordinary.set_state(before); throw; }
      ordinary.set_state(before);
    }
  } else run();
  for (auto& [cpu, mine] : call.seen) give_back(cpu, mine);
  const size_t m = schema.returns().size(), first = stack->size() - m;
  for (size_t i = 0; i < m; i++) {
    auto& v = (*stack)[first + i];
    if (v.isTensor()) v = call.out(v.toTensor());
    else if (v.isTensorList()) { auto list = v.toTensorVector(); for (auto& t : list) t = call.out(t); v = c10::IValue(list); }
  }
}

static at::Tensor empty_strided(c10::SymIntArrayRef sizes_, c10::SymIntArrayRef strides_, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> d, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "only CPU tensors can be pinned");
  auto sizes = C10_AS_INTARRAYREF_SLOW(sizes_), strides = C10_AS_INTARRAYREF_SLOW(strides_);
  auto type = caffe2::TypeMeta::fromScalarType(dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
  int device = d.has_value() ? Guard::index(*d) : current_device;
  int64_t last = 1;
  for (size_t i = 0; i < sizes.size(); i++) { if (sizes[i] == 0) { last = 0; break; } last += (sizes[i] - 1) * strides[i]; }
  size_t bytes = last * type.itemsize();
  c10::Storage s(c10::Storage::use_byte_size_t(), bytes, allocator.make(bytes, device), &allocator, true);
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(s), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return t;
}
static at::Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, std::optional<at::Device> d, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  std::vector<c10::SymInt> strides(sizes.size());
  c10::SymInt step = 1;
  for (int64_t i = int64_t(sizes.size()) - 1; i >= 0; i--) { strides[i] = step; step = step * (sizes[i] == 0 ? c10::SymInt(1) : sizes[i]); }
  auto t = empty_strided(sizes, strides, dtype, layout, d, pin);
  if (format.has_value() && *format != at::MemoryFormat::Contiguous && *format != at::MemoryFormat::Preserve) t.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return t;
}
static bool is_plain(const at::Tensor& a, const at::Tensor& b) {
  return a.dtype() == b.dtype() && a.sizes() == b.sizes() && a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}
static at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const int device = is_device(to) ? to.device().index() : from.device().index();
  const int64_t stream = stream_of(device);
  if (is_device(from) && is_device(to)) {
    drain_current(device);
    if (from.device() != to.device()) { drain_current(from.device().index()); note("peer_copy", to.nbytes(), false, stream, device); }
    mem(to).copy_(mem(from));
    return to;
  }
  TORCH_CHECK(is_device(from) ? to.device().is_cpu() : from.device().is_cpu(), "no copy from ", from.device(), " to ", to.device());
  const bool up = is_device(to);
  const bool is_pin = is_pinned(up ? from.storage().data() : to.storage().data());
  if (non_blocking && is_pin && from.expand_as(to).is_same_size(to) && is_plain(from, to)) {
    note(up ? "h2d_async" : "d2h_async", to.nbytes(), true, stream, device);
    auto bytes = to.nbytes();
    char* source = up ? (char*)from.data_ptr() : to_host((char*)from.storage().data() + from.storage_offset() * from.itemsize());
    char* target = up ? to_host((char*)to.storage().data() + to.storage_offset() * to.itemsize()) : (char*)to.data_ptr();
    // On CUDA, torch's pinned allocator keeps it alive.
    c10::Storage held(up ? from.storage() : to.storage());
    if (!up && POISON && LAZY) memset(target, 0xFF, bytes);
    enqueue(device, stream, [=] { (void)held; memcpy(target, source, bytes); });
    return to;
  }
  note(up ? (non_blocking && !is_pin ? "h2d_nonblocking_pageable" : "h2d_sync") : (non_blocking && !is_pin ? "d2h_nonblocking_pageable" : "d2h_sync"), to.nbytes(), is_pin, stream, device);
  drain_current(device);
  if (up) mem(to).copy_(from); else const_cast<at::Tensor&>(to).copy_(mem(from));
  return to;
}
static at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}
static at::Scalar local_scalar_dense(const at::Tensor& t) {
  note("item", t.nbytes(), false, stream_of(t.device().index()), t.device().index());
  drain_current(t.device().index());
  return at::_local_scalar_dense(mem(t));
}
static at::Tensor as_strided(const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<int64_t> offset) {
  auto r = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(t.storage()), t.key_set(), t.dtype());
  at::native::setStrided(r, sizes, strides, offset.value_or(t.storage_offset()));
  return r;
}
static at::Tensor& set_storage_offset(at::Tensor& t, at::Storage s, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  TORCH_CHECK(s.device().type() == P1, "set_: the storage is on ", s.device());
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(s));
  impl->set_storage_offset(offset);
  if (strides.empty() && !sizes.empty()) impl->set_sizes_contiguous(sizes); else impl->set_sizes_and_strides(sizes, strides);
  return t;
}
static at::Tensor& set_storage(at::Tensor& t, at::Storage s) {
  int64_t n = s.nbytes() / t.itemsize();
  return set_storage_offset(t, std::move(s), 0, {n}, {1});
}
static at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& other) { return set_storage_offset(t, other.storage(), other.storage_offset(), other.sizes(), other.strides()); }
static at::Tensor& set_nothing(at::Tensor& t) {
  c10::Storage s(c10::Storage::use_byte_size_t(), 0, allocator.make(0, t.device().index()), &allocator, true);
  return set_storage_offset(t, std::move(s), 0, {0}, {1});
}
static void record_stream(at::Tensor& t, at::Stream s) { allocator.recordStream(t.storage().data_ptr(), s); }

// Of integers, as on CUDA.
static at::Tensor histc(
    const at::Tensor& t, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  drain_current(t.device().index());
  auto found = at::histc(mem(t).to(at::kDouble), bins, low, high).to(t.scalar_type());
  auto out = at::empty(found.sizes(), t.options());
  mem(out).copy_(found);
  return out;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("as_strided", as_strided);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("histc", histc);
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
using namespace at::autocast;
using at::autocast::CastPolicy;
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define EMU_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define EMU_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(EMU_LOWER)
  AT_FORALL_FP32(EMU_FP32)
}
}  // namespace emu

void init_ccl(py::module& m);
PYBIND11_MODULE(_C, m) {
  static emu::Hooks* hooks = new emu::Hooks;
  at::RegisterPrivateUse1HooksInterface(hooks);
  at::setHostAllocator(emu::P1, &emu::pinned_allocator);
  m.def("default_generator", [](int d) { return emu::generators()[d]; });
  m.def("watch", [](py::object f) { delete emu::hook; emu::hook = f.is_none() ? nullptr : new py::object(f); emu::watching = emu::hook != nullptr; });
  // `tensor.data = other` across devices, which torch allows only for devices it knows by name.
  m.def("set_data", [](const at::Tensor& t, const at::Tensor& other) {
    if (auto* meta = torch::autograd::impl::get_autograd_meta(t)) meta->grad_accumulator_.reset();
    t.unsafeGetTensorImpl()->shallow_copy_from(other.getIntrusivePtr());
  });
  m.def("num_kernels", [] { return emu::num_kernels.load(); });
  m.def("pending", [] { std::lock_guard<std::recursive_mutex> lock(emu::G); size_t n = 0; for (auto& [_, q] : emu::queues) n += q.work.size(); return n; });
  m.def("device_count", [] { return emu::NUM_DEVICES; });
  m.def("memory_info", [](int d) { return emu::allocator.getMemoryInfo(d); });
  init_ccl(m);
}
