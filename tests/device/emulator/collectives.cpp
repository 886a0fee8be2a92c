// Collectives of the emulated device: gloo's, on device memory. As with NCCL, tensors must be contiguous and on the rank's device.
#include "device.h"
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <atomic>
#include <cstdlib>
#include <list>

namespace emu {
using namespace c10d;
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<std::vector<at::Tensor>>;
template <class T> using Ptr = c10::intrusive_ptr<T>;

struct DeviceWork : Work {
  Ptr<Work> inner;
  std::atomic<bool> waited{false};  // gloo copies a result again at every wait
  explicit DeviceWork(Ptr<Work> w, bool is_done) : Work(-1, OpType::UNKNOWN), inner(std::move(w)), waited(is_done) {}
  bool isCompleted() override { return inner->isCompleted(); }
  bool isSuccess() const override { return inner->isSuccess(); }
  std::exception_ptr exception() const override { return inner->exception(); }
  int sourceRank() const override { return inner->sourceRank(); }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override { return waited.exchange(true) || inner->wait(timeout); }
  void abort() override { inner->abort(); }
  Ptr<c10::ivalue::Future> getFuture() override { return inner->getFuture(); }
};

struct DeviceBackend : Backend {
  Ptr<Backend> inner;
  std::list<std::pair<Ptr<Work>, Tensors>> running;  // keeps the tensors of unfinished work alive
  Tensors held;
  explicit DeviceBackend(Ptr<Backend> b) : Backend(b->getRank(), b->getSize()), inner(std::move(b)) {}
  const std::string getBackendName() const override { return "hccl"; }
  at::Tensor a(const at::Tensor& t) {
    TORCH_CHECK(is_device(t), "the device's process group got a tensor on ", t.device());
    TORCH_CHECK(t.is_contiguous() || t.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    const char* local = std::getenv("LOCAL_RANK");
    TORCH_CHECK(!local || std::atoi(local) == t.device().index(), "Duplicate device: rank with LOCAL_RANK ", local, " uses device ", int(t.device().index()));
    drain_current(t.device().index());
    held.push_back(t);
    return mem(t);
  }
  Tensors a(const Tensors& list) { Tensors out; for (auto& t : list) out.push_back(a(t)); return out; }
  Lists a(const Lists& lists) { Lists out; for (auto& l : lists) out.push_back(a(l)); return out; }
  Ptr<Work> done(Ptr<Work> w, bool is_done = false) {
    running.remove_if([](auto& item) { return item.first->isCompleted(); });
    running.emplace_back(w, std::move(held));
    held.clear();
    return c10::make_intrusive<DeviceWork>(std::move(w), is_done);
  }
  Ptr<Work> averaged(Ptr<Work> w, const Tensors& outs, bool is_average) {
    if (is_average) { w->wait(); for (auto t : outs) t.div_(getSize()); }
    return done(std::move(w), is_average);
  }
  template <class O> bool sums(O& opts) {
    bool is_average = opts.reduceOp == ReduceOp::AVG;
    if (is_average) opts.reduceOp = ReduceOp::SUM;
    TORCH_CHECK(!(opts.reduceOp == ReduceOp::PREMUL_SUM), "PREMUL_SUM is not emulated");
    return is_average;
  }
  Ptr<Work> broadcast(Tensors& t, const BroadcastOptions& o) override { auto x = a(t); return done(inner->broadcast(x, o)); }
  Ptr<Work> allreduce(Tensors& t, const AllreduceOptions& o_) override { auto o = o_; bool m = sums(o); auto x = a(t); return averaged(inner->allreduce(x, o), x, m); }
  Ptr<Work> allreduce_coalesced(Tensors& t, const AllreduceCoalescedOptions& o_) override { auto o = o_; bool m = sums(o); auto x = a(t); return averaged(inner->allreduce_coalesced(x, o), x, m); }
  Ptr<Work> reduce(Tensors& t, const ReduceOptions& o_) override { auto o = o_; bool m = sums(o); auto x = a(t); return averaged(inner->reduce(x, o), x, m); }
  Ptr<Work> allgather(Lists& out, Tensors& in, const AllgatherOptions& o) override { auto x = a(out); auto y = a(in); return done(inner->allgather(x, y, o)); }
  Ptr<Work> _allgather_base(at::Tensor& out, at::Tensor& in, const AllgatherOptions& o) override { auto x = a(out), y = a(in); return done(inner->_allgather_base(x, y, o)); }
  Ptr<Work> allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const AllgatherOptions& o) override { auto x = a(out), y = a(in); return done(inner->allgather_into_tensor_coalesced(x, y, o)); }
  Ptr<Work> gather(Lists& out, Tensors& in, const GatherOptions& o) override { auto x = a(out); auto y = a(in); return done(inner->gather(x, y, o)); }
  Ptr<Work> scatter(Tensors& out, Lists& in, const ScatterOptions& o) override { auto x = a(out); auto y = a(in); return done(inner->scatter(x, y, o)); }
  Ptr<Work> reduce_scatter(Tensors& out, Lists& in, const ReduceScatterOptions& o_) override { auto o = o_; bool m = sums(o); auto x = a(out); auto y = a(in); return averaged(inner->reduce_scatter(x, y, o), x, m); }
  Ptr<Work> _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const ReduceScatterOptions& o_) override { auto o = o_; bool m = sums(o); auto x = a(out), y = a(in); return averaged(inner->_reduce_scatter_base(x, y, o), {x}, m); }
  Ptr<Work> reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const ReduceScatterOptions& o_) override { auto o = o_; bool m = sums(o); auto x = a(out), y = a(in); return averaged(inner->reduce_scatter_tensor_coalesced(x, y, o), x, m); }
  Ptr<Work> alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& os, std::vector<int64_t>& is, const AllToAllOptions& o) override { auto x = a(out), y = a(in); return done(inner->alltoall_base(x, y, os, is, o)); }
  Ptr<Work> send(Tensors& t, int to, int tag) override { auto x = a(t); return done(inner->send(x, to, tag)); }
  Ptr<Work> recv(Tensors& t, int from, int tag) override { auto x = a(t); return done(inner->recv(x, from, tag)); }
  Ptr<Work> barrier(const BarrierOptions& o) override { return done(inner->barrier(o)); }
  void setSequenceNumberForGroup() override { inner->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds t) override { inner->setTimeout(t); }
  void abort() override { inner->abort(); }
  void shutdown() override { inner->shutdown(); }
};
}  // namespace emu

void init_ccl(py::module& m) {
  m.def("make_backend", [](const c10::intrusive_ptr<c10d::Backend>& inner) -> c10::intrusive_ptr<c10d::Backend> { return c10::make_intrusive<emu::DeviceBackend>(inner); });
}
