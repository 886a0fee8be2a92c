// Collectives of the emulated device: gloo's, on device memory, with the rules of NCCL (rules.h).
// Tensors must be contiguous and on the rank's device.
#include "device.h"
#include "rules.h"
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <functional>
#include <list>

namespace emu {
using namespace c10d;
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<std::vector<at::Tensor>>;
template <class T> using Ptr = c10::intrusive_ptr<T>;

// One call of a group: a collective, a transfer, or a batch.
struct DeviceWork : Work {
  struct Part {
    Ptr<Work> inner;
    std::string key;  // of Rules
  };
  std::shared_ptr<Rules> rules;
  std::vector<Part> parts;
  Tensors tensors;                // stay alive until the work is done
  std::function<void()> finally;  // runs once, after the parts
  std::thread::id thread = std::this_thread::get_id();
  std::atomic<bool> is_waited{false};  // gloo copies a result again at every wait
  std::mutex waiting;

  explicit DeviceWork(std::shared_ptr<Rules> r) : Work(-1, OpType::UNKNOWN), rules(std::move(r)) {}
  bool isCompleted() override {
    auto is_done = [](const Part& part) { return part.inner->isCompleted(); };
    return is_waited || std::all_of(parts.begin(), parts.end(), is_done);
  }
  bool isSuccess() const override {
    auto is_good = [](const Part& part) { return part.inner->isSuccess(); };
    return std::all_of(parts.begin(), parts.end(), is_good);
  }
  std::exception_ptr exception() const override {
    return parts.empty() ? nullptr : parts[0].inner->exception();  // none: a batch of collectives
  }
  int sourceRank() const override { return parts.at(0).inner->sourceRank(); }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override {
    std::lock_guard<std::mutex> lock(waiting);
    if (is_waited) return true;
    for (auto& part : parts) {
      rules->wait_for_all(part.key, [&] { return part.inner->isCompleted(); });
      try {
        part.inner->wait(timeout);
      } catch (const std::exception&) {
        rules->look_for_refusal();  // another rank may have ended after its refusal
        throw;
      }
    }
    if (finally) finally();
    is_waited = true;
    return true;
  }
  void abort() override {
    for (auto& part : parts) part.inner->abort();
  }
  Ptr<c10::ivalue::Future> getFuture() override {
    if (!parts.empty()) return parts[0].inner->getFuture();
    wait(kNoTimeout);
    auto done = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    done->markCompleted(c10::IValue(tensors));
    return done;
  }
};

static std::string describe(const at::Tensor& t) {
  return c10::str(c10::toString(t.scalar_type()), "[", t.numel(), "]");
}
static std::string describe(const Tensors& tensors) {
  std::string text;
  for (auto& t : tensors) text += (text.empty() ? "" : " ") + describe(t);
  return text;
}
static std::string describe(const ReduceOp& op) {
  static const char* names[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"};
  return op.op_ < 8 ? names[op.op_] : "another operation";
}
static std::string rank_named(int64_t rank) { return "rank " + std::to_string(rank); }

struct DeviceBackend : Backend {
  struct Transfer {
    at::Tensor memory;
    int peer;
    bool is_send;
  };
  Ptr<Backend> inner;
  std::shared_ptr<Rules> rules;
  std::list<Ptr<DeviceWork>> running;  // keeps unfinished work alive
  std::mutex mutex;                    // of `running`, `owner` and `depth`
  std::thread::id owner;               // the thread that is in a call
  int depth = 0;                       // calls of that thread; a batch has calls in it
  bool is_batch = false;
  std::vector<Transfer> transfers;  // of the batch
  Tensors batch_tensors;
  std::vector<Ptr<Work>> batch_works;  // collectives in the batch

  DeviceBackend(Ptr<Backend> b, const Ptr<Store>& store)
      : Backend(b->getRank(), b->getSize()), inner(std::move(b)) {
    rules = std::make_shared<Rules>(store, rank_, size_);
  }
  const std::string getBackendName() const override { return "hccl"; }

  void enter() {
    std::unique_lock<std::mutex> lock(mutex);
    auto own = std::this_thread::get_id();
    running.remove_if([](auto& work) { return work->isCompleted(); });
    auto is_other = [&](auto& work) { return work->thread != own; };
    bool is_busy = std::any_of(running.begin(), running.end(), is_other);
    if (is_busy || (depth && owner != own)) {
      lock.unlock();
      rules->refuse(
          "two threads use one group at the same time: a call of another thread is unfinished");
    }
    owner = own;
    ++depth;
  }
  void leave() {
    std::lock_guard<std::mutex> lock(mutex);
    --depth;
  }

  // One call, from its arguments' check to its start in gloo.
  struct Call {
    DeviceBackend& backend;
    Ptr<DeviceWork> work;
    std::string key;

    explicit Call(DeviceBackend& b) : backend(b) {
      backend.enter();
      work = c10::make_intrusive<DeviceWork>(backend.rules);
    }
    Call(const Call&) = delete;
    ~Call() { backend.leave(); }

    at::Tensor memory(const at::Tensor& t) {
      TORCH_CHECK(is_device(t), "the device's process group got a tensor on ", t.device());
      bool is_dense = t.is_contiguous() || t.is_non_overlapping_and_dense();
      TORCH_CHECK(is_dense, "Tensors must be contiguous");
      const char* local = std::getenv("LOCAL_RANK");
      int index = t.device().index();
      bool is_own = !local || std::atoi(local) == index;
      TORCH_CHECK(is_own, "Duplicate device: LOCAL_RANK ", local, " uses device ", index);
      drain_current(index);
      work->tensors.push_back(t);
      return mem(t);
    }
    Tensors memory(const Tensors& list) {
      Tensors out;
      for (auto& t : list) out.push_back(memory(t));
      return out;
    }
    Lists memory(const Lists& lists) {
      Lists out;
      for (auto& list : lists) out.push_back(memory(list));
      return out;
    }

    // gloo has no AVG: return options with SUM, and divide `outs` afterwards.
    template <class O> O summed(O options, const Tensors& outs) {
      bool is_premultiplied = options.reduceOp == ReduceOp::PREMUL_SUM;
      TORCH_CHECK(!is_premultiplied, "PREMUL_SUM is not emulated");
      if (options.reduceOp == ReduceOp::AVG) {
        options.reduceOp = ReduceOp::SUM;
        work->finally = [outs, size = backend.size_] {
          for (auto t : outs) t.div_(size);
        };
      }
      return options;
    }

    // `what` must be equal on all ranks.
    template <class... What> void begin(const What&... what) {
      key = backend.rules->begin_collective(c10::str(what...));
    }
    Ptr<Work> started(Ptr<Work> in_gloo) {
      work->parts.push_back({std::move(in_gloo), key});
      return added();
    }
    Ptr<Work> added() {
      std::lock_guard<std::mutex> lock(backend.mutex);
      backend.running.push_back(work);
      if (backend.is_batch) backend.batch_works.push_back(work);
      return work;
    }
  };

  Ptr<Work> broadcast(Tensors& t, const BroadcastOptions& o) override {
    Call call(*this);
    auto x = call.memory(t);
    call.begin("broadcast of ", describe(x), " from ", rank_named(o.rootRank));
    return call.started(inner->broadcast(x, o));
  }
  Ptr<Work> allreduce(Tensors& t, const AllreduceOptions& o) override {
    Call call(*this);
    auto x = call.memory(t);
    auto sum = call.summed(o, x);
    call.begin("all_reduce of ", describe(x), " with ", describe(o.reduceOp));
    return call.started(inner->allreduce(x, sum));
  }
  Ptr<Work> allreduce_coalesced(Tensors& t, const AllreduceCoalescedOptions& o) override {
    Call call(*this);
    auto x = call.memory(t);
    auto sum = call.summed(o, x);
    call.begin("coalesced all_reduce of ", describe(x), " with ", describe(o.reduceOp));
    return call.started(inner->allreduce_coalesced(x, sum));
  }
  Ptr<Work> reduce(Tensors& t, const ReduceOptions& o) override {
    Call call(*this);
    auto x = call.memory(t);
    auto to = rank_named(o.rootRank);
    auto sum = call.summed(o, o.rootRank == rank_ ? x : Tensors());
    call.begin("reduce of ", describe(x), " with ", describe(o.reduceOp), " to ", to);
    return call.started(inner->reduce(x, sum));
  }
  Ptr<Work> allgather(Lists& out, Tensors& in, const AllgatherOptions& o) override {
    Call call(*this);
    auto x = call.memory(out);
    auto y = call.memory(in);
    call.begin("all_gather of ", describe(x.at(0)));  // the inputs may differ in size
    return call.started(inner->allgather(x, y, o));
  }
  Ptr<Work> _allgather_base(at::Tensor& out, at::Tensor& in, const AllgatherOptions& o) override {
    Call call(*this);
    auto x = call.memory(out);
    auto y = call.memory(in);
    call.begin("all_gather into one tensor of ", describe(y));
    return call.started(inner->_allgather_base(x, y, o));
  }
  Ptr<Work> allgather_into_tensor_coalesced(
      Tensors& out, Tensors& in, const AllgatherOptions& o) override {
    Call call(*this);
    auto x = call.memory(out);
    auto y = call.memory(in);
    call.begin("coalesced all_gather of ", describe(y));
    return call.started(inner->allgather_into_tensor_coalesced(x, y, o));
  }
  Ptr<Work> gather(Lists& out, Tensors& in, const GatherOptions& o) override {
    Call call(*this);
    auto x = call.memory(out);
    auto y = call.memory(in);
    call.begin("gather of ", describe(y), " to ", rank_named(o.rootRank));
    return call.started(inner->gather(x, y, o));
  }
  Ptr<Work> scatter(Tensors& out, Lists& in, const ScatterOptions& o) override {
    Call call(*this);
    auto x = call.memory(out);
    auto y = call.memory(in);
    call.begin("scatter of ", describe(x), " from ", rank_named(o.rootRank));
    return call.started(inner->scatter(x, y, o));
  }
  Ptr<Work> reduce_scatter(Tensors& out, Lists& in, const ReduceScatterOptions& o) override {
    Call call(*this);
    auto x = call.memory(out);
    auto y = call.memory(in);
    auto sum = call.summed(o, x);
    call.begin("reduce_scatter of ", describe(y.at(0)), " with ", describe(o.reduceOp));
    return call.started(inner->reduce_scatter(x, y, sum));
  }
  Ptr<Work> _reduce_scatter_base(
      at::Tensor& out, at::Tensor& in, const ReduceScatterOptions& o) override {
    Call call(*this);
    auto x = call.memory(out);
    auto y = call.memory(in);
    auto sum = call.summed(o, {x});
    call.begin("reduce_scatter of one tensor, ", describe(y), ", with ", describe(o.reduceOp));
    return call.started(inner->_reduce_scatter_base(x, y, sum));
  }
  Ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors& out, Tensors& in, const ReduceScatterOptions& o) override {
    Call call(*this);
    auto x = call.memory(out);
    auto y = call.memory(in);
    auto sum = call.summed(o, x);
    call.begin("coalesced reduce_scatter of ", describe(y), " with ", describe(o.reduceOp));
    return call.started(inner->reduce_scatter_tensor_coalesced(x, y, sum));
  }
  Ptr<Work> alltoall_base(
      at::Tensor& out,
      at::Tensor& in,
      std::vector<int64_t>& out_sizes,
      std::vector<int64_t>& in_sizes,
      const AllToAllOptions& o) override {
    Call call(*this);
    auto x = call.memory(out);
    auto y = call.memory(in);
    bool is_even = out_sizes.empty() && in_sizes.empty();
    call.begin("all_to_all of ", is_even ? describe(y) : c10::toString(y.scalar_type()));
    return call.started(inner->alltoall_base(x, y, out_sizes, in_sizes, o));
  }
  Ptr<Work> barrier(const BarrierOptions& o) override {
    Call call(*this);
    call.begin("barrier");
    return call.started(inner->barrier(o));
  }

  // -------------------------------------------------------------- sends and receives
  Ptr<Work> send(Tensors& t, int to, int) override { return transfer(t.at(0), to, true); }
  Ptr<Work> recv(Tensors& t, int from, int) override { return transfer(t.at(0), from, false); }
  Ptr<Work> transfer(const at::Tensor& t, int peer, bool is_send) {
    Call call(*this);
    Transfer one{call.memory(t), peer, is_send};
    if (is_batch) {
      transfers.push_back(one);
      batch_tensors.push_back(t);
      return call.work;
    }
    call.key = begin_transfer(one, false);
    return call.started(start_transfer(one));
  }
  std::string begin_transfer(const Transfer& one, bool is_batched) {
    int from = one.is_send ? rank_ : one.peer;
    int to = one.is_send ? one.peer : rank_;
    return rules->begin_transfer(from, to, describe(one.memory), is_batched);
  }
  Ptr<Work> start_transfer(const Transfer& one) {
    Tensors memory{one.memory};  // NCCL ignores tags
    return one.is_send ? inner->send(memory, one.peer, 0) : inner->recv(memory, one.peer, 0);
  }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {
    enter();
    if (is_batch) leave();  // the last batch ended with an error
    is_batch = true;
    transfers.clear();
    batch_tensors.clear();
    batch_works.clear();
  }
  Ptr<Work> endCoalescing() override {
    Call call(*this);
    is_batch = false;
    leave();
    call.work->tensors = batch_tensors;
    call.work->finally = [works = std::move(batch_works)] {
      for (auto& work : works) work->wait();
    };
    if (!transfers.empty()) rules->begin_batch();
    std::vector<std::string> keys;
    for (auto& one : transfers) keys.push_back(begin_transfer(one, true));
    for (size_t i = 0; i < transfers.size(); ++i) {
      call.work->parts.push_back({start_transfer(transfers[i]), keys[i]});
    }
    return call.added();
  }

  void setSequenceNumberForGroup() override { inner->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds t) override { inner->setTimeout(t); }
  void abort() override { inner->abort(); }
  void shutdown() override { inner->shutdown(); }
};
}  // namespace emu

void init_ccl(py::module& m) {
  using Backend = c10::intrusive_ptr<c10d::Backend>;
  using Store = c10::intrusive_ptr<c10d::Store>;
  m.def("make_backend", [](const Backend& inner, const Store& store) -> Backend {
    return c10::make_intrusive<emu::DeviceBackend>(inner, store);
  });
}
