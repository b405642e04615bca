// A virtual CUDA device for torch's CPU build. Its tensors report cuda:0, their memory is the host's, and every operator
// computes with the kernels of the CPU. What mixes devices raises where CUDA raises, and what makes the host wait for
// the device is reported to Python. It has to be loaded before `import torch`, so that torch sees it at its first look.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace virtual_gpu {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using torch::jit::Stack;
using Names = std::unordered_set<std::string>;

constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr int UNWRITTEN = 0xFF;  // every byte of memory that nothing has written: NaN in all formats

static DeviceIndex device_count = 1;
static thread_local DeviceIndex current_device = 0;
static thread_local c10::StreamId current_stream = 0;
static thread_local bool is_capturing = false;

// ---------------------------------------------------------------------------------------------------------- reports

static py::handle reporter;  // called with a kind ("wait" or "hazard") and a text

static void report(const char* kind, const std::string& what) {
  py::gil_scoped_acquire gil;
  if (reporter) reporter(kind, what);
}

static void finish_copies();

static void wait(const std::string& what) {
  TORCH_CHECK(
      !is_capturing,
      "CUDA error: operation not permitted when stream is capturing\n(virtual GPU: ", what, " waits for the device)");
  report("wait", what);
  finish_copies();
}

// ----------------------------------------------------------------------------------------------------------- memory

static std::atomic<int64_t> bytes_now{0}, bytes_peak{0};

static void count_bytes(int64_t bytes) {
  int64_t now = bytes_now += bytes, peak = bytes_peak;
  while (now > peak && !bytes_peak.compare_exchange_weak(peak, now)) {}
}

static void* host_memory(size_t size) {
  void* memory = nullptr;
  TORCH_CHECK(posix_memalign(&memory, 512, std::max<size_t>(size, 1)) == 0, "CUDA out of memory (virtual GPU)");
  return memory;
}

struct Block {
  void* memory;
  int64_t size;
};

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto* block = new Block{host_memory(size), static_cast<int64_t>(size)};
    memset(block->memory, UNWRITTEN, size);
    count_bytes(block->size);
    const auto release = [](void* context) {
      auto* block = static_cast<Block*>(context);
      count_bytes(-block->size);
      free(block->memory);
      delete block;
    };
    return {block->memory, block, release, Device(CUDA, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
static DeviceAllocator device_allocator;

static std::mutex pinned_mutex;
static std::map<uintptr_t, size_t> pinned;  // sizes by begin

struct PinnedAllocator final : c10::Allocator {
  static void release(void* memory) {
    {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned.erase(reinterpret_cast<uintptr_t>(memory));
    }
    free(memory);
  }
  c10::DataPtr allocate(size_t size) override {
    void* memory = host_memory(size);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[reinterpret_cast<uintptr_t>(memory)] = std::max<size_t>(size, 1);
    return {memory, memory, &release, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
static PinnedAllocator pinned_allocator;

static bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  const auto address = reinterpret_cast<uintptr_t>(data);
  auto block = pinned.upper_bound(address);
  return block != pinned.begin() && address < (--block)->first + block->second;
}

// Copies between pinned memory and the device for which nothing has waited yet. One to the device is made at once, and
// its source must be unchanged at the next wait. One to the host is made at the next wait; before, nothing is there.
struct PendingCopy {
  Tensor host, value;  // both of the CPU and contiguous
  bool is_upload;
};
static std::mutex pending_mutex;
static std::vector<PendingCopy> pending;

static void add_pending(PendingCopy copy) {
  std::lock_guard<std::mutex> lock(pending_mutex);
  pending.push_back(std::move(copy));
}

static void finish_copies() {
  std::vector<PendingCopy> copies;
  {
    std::lock_guard<std::mutex> lock(pending_mutex);
    copies.swap(pending);
  }
  for (auto& copy : copies) {
    const auto* value = copy.value.const_data_ptr();
    if (!copy.is_upload) {
      memcpy(copy.host.mutable_data_ptr(), value, copy.value.nbytes());
    } else if (memcmp(copy.host.const_data_ptr(), value, copy.value.nbytes()) != 0) {
      report("hazard", "pinned memory was changed before its copy was done");
    }
  }
}

// ------------------------------------------------------------------------------------------------- guards and hooks

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Device indexed(Device device) { return Device(CUDA, std::max<DeviceIndex>(device.index(), 0)); }
  c10::DeviceType type() const override { return CUDA; }
  Device exchangeDevice(Device to) const override {
    const Device before = getDevice();
    setDevice(to);
    return before;
  }
  Device getDevice() const override { return Device(CUDA, current_device); }
  void setDevice(Device to) const override { uncheckedSetDevice(to); }
  void uncheckedSetDevice(Device to) const noexcept override { if (to.index() >= 0) current_device = to.index(); }
  c10::Stream getStream(Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, indexed(device), current_stream);
  }
  c10::Stream getDefaultStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, indexed(device));
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    static std::atomic<c10::StreamId> next{1};
    return c10::Stream(c10::Stream::UNSAFE, indexed(device), next++);
  }
  c10::Stream getNewStream(Device device, int) const override { return getStreamFromGlobalPool(device, false); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return device_count; }
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new char;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    finish_copies();  // an event that has arrived says so of all that was asked for before it
    return true;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<char*>(event); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait("synchronize of a stream"); }
  void synchronizeEvent(void*) const override { wait("synchronize of an event"); }
  void synchronizeDevice(const DeviceIndex) const override { wait("synchronize"); }
};
static c10::impl::DeviceGuardImplRegistrar guard_registrar(CUDA, new Guard());

}  // namespace virtual_gpu

namespace at {  // where torch looks for them
struct VirtualCUDAHooks : CUDAHooksInterface {
  explicit VirtualCUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return virtual_gpu::device_count; }
  int getNumGPUs() const override { return virtual_gpu::device_count; }
  DeviceIndex current_device() const override { return virtual_gpu::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { virtual_gpu::current_device = device; }
  DeviceIndex getCurrentDevice() const override { return virtual_gpu::current_device; }
  DeviceIndex exchangeDevice(DeviceIndex to) const override { return std::exchange(virtual_gpu::current_device, to); }
  DeviceIndex maybeExchangeDevice(DeviceIndex to) const override { return exchangeDevice(to); }
  bool isPinnedPtr(const void* data) const override { return virtual_gpu::is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &virtual_gpu::pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &virtual_gpu::device_allocator; }
  Device getDeviceFromPtr(void*) const override { return Device(kCUDA, 0); }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex) const override { return detail::createCPUGenerator(); }
  void deviceSynchronize(DeviceIndex) const override { virtual_gpu::wait("synchronize"); }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, VirtualCUDAHooks)
}  // namespace at

namespace virtual_gpu {

// ---------------------------------------------------------------------------------------- two tensors of one memory

static void delete_storage(void* storage) { delete static_cast<c10::Storage*>(storage); }

static c10::DataPtr data_on(const c10::Storage& storage, Device device) {
  return {storage.mutable_data(), new c10::Storage(storage), &delete_storage, device};
}

static c10::Storage storage_on(const c10::Storage& storage, Device device) {
  c10::Allocator* allocator = device.is_cuda() ? &device_allocator : c10::GetCPUAllocator();
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), data_on(storage, device), allocator, true);
}

static Tensor tensor_in(c10::Storage storage, const Tensor& like) {
  const auto key = storage.device().is_cuda() ? DispatchKey::CUDA : DispatchKey::CPU;
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

static Tensor host_alias(const Tensor& tensor) {
  return tensor.is_cuda() ? tensor_in(storage_on(tensor.storage(), Device(c10::kCPU)), tensor) : tensor;
}

static bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

// ---------------------------------------------------------------------------------------------------------- capture

struct Step {
  c10::OperatorHandle op;
  Stack arguments;              // with tensors of the host
  std::vector<Tensor> results;  // those that the operator made, of the host
};

struct Graph {
  std::vector<Step> steps;
  std::unordered_map<c10::StorageImpl*, c10::Storage> made;  // during capture
  std::map<c10::StorageImpl*, std::pair<c10::Storage, std::string>> before;  // what capture must leave as it was
};
static std::shared_ptr<Graph> capturing;  // CUDA too captures one at a time

static void note_made(const Tensor& tensor) {
  if (is_capturing && on_device(tensor))
    capturing->made.emplace(tensor.storage().unsafeGetStorageImpl(), tensor.storage());
}

static void note_written(const c10::Storage& storage) {
  auto* impl = storage.unsafeGetStorageImpl();
  if (!is_capturing || capturing->made.count(impl) || capturing->before.count(impl)) return;
  std::string bytes(static_cast<const char*>(storage.data()), storage.nbytes());
  capturing->before.emplace(impl, std::make_pair(storage, std::move(bytes)));
}

static void end_capture() {
  is_capturing = false;
  auto graph = std::exchange(capturing, nullptr);
  for (auto& [impl, storage] : graph->made) memset(storage.mutable_data(), UNWRITTEN, storage.nbytes());
  for (auto& [impl, memory] : graph->before)
    memcpy(memory.first.mutable_data(), memory.second.data(), memory.second.size());
  graph->before.clear();
}

// Calls `visit` with every tensor of a value, and replaces the tensor by what that returns.
template <typename Visit>
static void replace_tensors(c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    value = visit(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorList()) list.push_back(visit(tensor));
    value = std::move(list);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<Tensor>(visit(*tensor)) : std::nullopt);
    value = std::move(list);
  }
}

static void replay(const Graph& graph) {
  at::AutoDispatchBelowADInplaceOrView below;
  for (const auto& step : graph.steps) {
    Stack stack = step.arguments;
    step.op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
    size_t next = 0;
    const auto keep = [&](const Tensor& result) {
      const auto is_result = [&](const c10::IValue& value) { return value.isTensor() && value.toTensor().is_same(result); };
      if (result.defined() && std::none_of(step.arguments.begin(), step.arguments.end(), is_result))
        if (Tensor kept = step.results.at(next++); kept.numel()) kept.copy_(result);
      return result;
    };
    for (auto value = stack.end() - step.op.schema().returns().size(); value != stack.end(); ++value)
      replace_tensors(*value, keep);
  }
}

// ------------------------------------------------------------------------------------- what CUDA refuses, and waits

static Names with_in_place(const std::vector<std::string>& names) {
  Names all;
  for (const auto& name : names) all.insert({"aten::" + name, "aten::" + name + "_"});
  return all;
}

static const Names takes_number = with_in_place({  // one number of the CPU beside tensors of the GPU
    "add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "pow", "atan2", "maximum",
    "minimum", "fmax", "fmin", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor",
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift", "copysign", "hypot",
    "logaddexp", "logaddexp2", "xlogy", "heaviside", "where", "fill", "lerp", "addcmul", "addcdiv", "masked_fill"});
static const Names takes_host_indices = with_in_place({"index", "index_put", "_index_put_impl", "_unsafe_index"});
static const Names waits_for_sizes = with_in_place({
    "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
    "bincount", "equal", "histc", "multinomial"});
static const Names without_integers = with_in_place({"mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot", "addbmm"});

// Looks at the arguments of one call.
struct Inspection {
  const c10::OperatorHandle& op;
  const std::string& plain = op.operator_name().name;  // without the overload
  std::optional<DeviceIndex> index;                    // of the device of the tensors
  std::string on_cpu;                                  // an argument that may not be there
  bool has_mask = false, has_cpu_value = false;

  std::string name() const {
    const auto& overload = op.operator_name().overload_name;
    return overload.empty() ? plain : plain + "." + overload;
  }

  [[noreturn]] void refuse(const std::string& argument, Device device, Device other) const {
    TORCH_CHECK(
        false, "Expected all tensors to be on the same device, but got ", argument, " is on ", device,
        ", different from other tensors on ", other, " (when checking argument in method wrapper_CUDA_", plain, ")");
  }

  void look(const Tensor& tensor, const c10::Argument& argument, bool is_index) {
    if (!tensor.defined() || tensor.is_meta()) return;
    const auto dtype = tensor.scalar_type();
    if (is_index) has_mask |= dtype == at::kBool || dtype == at::kByte;
    if (tensor.is_cuda()) {
      if (index && tensor.get_device() != *index) refuse(argument.name(), tensor.device(), Device(CUDA, *index));
      index = tensor.get_device();
      if (without_integers.count(plain) && c10::isIntegralType(dtype, true))
        TORCH_CHECK_NOT_IMPLEMENTED(false, "\"", plain, "_cuda\" not implemented for '", dtype, "'");
    } else if (is_index) {  // `index` has copied them by now
      if (tensor.numel() && plain == "aten::_index_put_impl_") wait(plain + " with indices of the CPU");
    } else {
      const bool is_number = tensor.dim() == 0 && !(argument.alias_info() && argument.alias_info()->isWrite());
      const bool is_put = is_number && plain == "aten::_index_put_impl_" && argument.name() == "values";
      const bool is_wrapped = tensor.unsafeGetTensorImpl()->is_wrapped_number();
      has_cpu_value |= is_put;
      if (!is_put && !(is_number && (is_wrapped || takes_number.count(plain)))) on_cpu = argument.name();
    }
  }

  void look_at_all(c10::IValue* values) {
    const auto& arguments = op.schema().arguments();
    const bool takes_indices = takes_host_indices.count(plain);
    for (size_t position = 0; position < arguments.size(); ++position) {
      auto& value = values[position];
      const bool is_index = takes_indices && (value.isList() || value.isOptionalTensorList());
      if (value.isTensor()) {
        look(value.toTensor(), arguments[position], false);
      } else if (value.isList()) {
        for (const c10::IValue& item : value.toList())
          if (item.isTensor()) look(item.toTensor(), arguments[position], is_index);
      }
    }
    if (!on_cpu.empty()) refuse(on_cpu, Device(c10::kCPU), Device(CUDA, index.value_or(current_device)));
  }

  void wait_where_it_waits(const c10::IValue* values) const {
    if (plain == "aten::_index_put_impl_") {  // of one number behind one mask `masked_fill_` is made
      const auto& number = values[2].toTensor();
      const bool fills = has_mask && number.numel() == 1 && values[1].toListRef().size() == 1;
      if (fills ? number.is_cuda() : has_mask || has_cpu_value) wait(plain);
    }
    const auto& last = values[op.schema().arguments().size() - 1];
    if (plain.rfind("aten::masked_fill", 0) == 0 || plain == "aten::index_fill_")
      if (last.isTensor() && last.toTensor().is_cuda()) wait(plain + " by a number of the device");
    if (name() == "aten::repeat_interleave.Tensor" && values[1].isNone()) wait("repeat_interleave without output_size");
    if (waits_for_sizes.count(plain)) wait(plain);
  }
};

// -------------------------------------------------------------------------------- an operator of the CPU in its place

// Shows an operator of the CPU the memory of the device, and takes back what it made.
struct Call {
  DeviceIndex index = 0;
  std::unordered_map<c10::StorageImpl*, c10::Storage> host_storages, device_storages;  // each by the other one
  std::unordered_map<c10::TensorImpl*, Tensor> device_tensors;                         // by their aliases
  std::vector<Tensor> aliases;

  Tensor host(const Tensor& tensor) {
    auto [storage, is_new] = host_storages.try_emplace(tensor.storage().unsafeGetStorageImpl());
    if (is_new) {
      storage->second = storage_on(tensor.storage(), Device(c10::kCPU));
      device_storages.emplace(storage->second.unsafeGetStorageImpl(), tensor.storage());
    }
    auto alias = tensor_in(storage->second, tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    device_tensors.emplace(alias.unsafeGetTensorImpl(), tensor);
    aliases.push_back(alias);
    return alias;
  }

  // Returns the tensor of the device of a result, and adds the result to `made` if the operator made it.
  Tensor device(const Tensor& result, std::vector<Tensor>& made) {
    if (!result.defined() || !result.is_cpu()) return result;
    const auto known = device_tensors.find(result.unsafeGetTensorImpl());
    if (known != device_tensors.end()) return known->second;
    auto [storage, is_new] = device_storages.try_emplace(result.storage().unsafeGetStorageImpl());
    if (is_new) storage->second = storage_on(result.storage(), Device(CUDA, index));
    auto tensor = tensor_in(storage->second, result);
    if (is_new) note_made(tensor);
    made.push_back(result);
    return tensor;
  }

  // Takes over the sizes and the memory that an operator has given to what it wrote to.
  void write_back() {
    for (auto& alias : aliases) {
      const auto& tensor = device_tensors.at(alias.unsafeGetTensorImpl());
      const auto& storage = tensor.storage();
      if (alias.storage().nbytes() > storage.nbytes()) {
        storage.unsafeGetStorageImpl()->set_nbytes(alias.storage().nbytes());
        storage.set_data_ptr(data_on(alias.storage(), storage.device()));
      }
      if (tensor.sizes() != alias.sizes() || tensor.strides() != alias.strides())
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }
};

static void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto begin = stack->size() - schema.arguments().size();
  auto* values = stack->data() + begin;
  Inspection inspection{op};
  inspection.look_at_all(values);
  inspection.wait_where_it_waits(values);

  Call call{inspection.index.value_or(current_device)};
  for (size_t position = 0; position < schema.arguments().size(); ++position) {
    const auto& argument = schema.arguments()[position];
    auto& value = values[position];
    replace_tensors(value, [&](const Tensor& tensor) {
      if (!on_device(tensor)) return tensor;
      if (argument.alias_info() && argument.alias_info()->isWrite()) note_written(tensor.storage());
      return call.host(tensor);
    });
    if (value.isDevice() && value.toDevice().is_cuda()) {
      if (!inspection.index && value.toDevice().has_index()) call.index = value.toDevice().index();
      value = Device(c10::kCPU);
    } else if (value.isBool() && argument.name() == "pin_memory") {
      value = false;
    }
  }
  Stack arguments;
  if (is_capturing) arguments.assign(stack->begin() + begin, stack->end());
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  }
  call.write_back();
  std::vector<Tensor> made;
  for (auto value = stack->end() - schema.returns().size(); value != stack->end(); ++value)
    replace_tensors(*value, [&](const Tensor& result) { return call.device(result, made); });
  if (is_capturing) capturing->steps.push_back({op, std::move(arguments), std::move(made)});
}

static void fallback(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) { run_on_host(op, stack); }

// ----------------------------------------------------------------------------------------- operators about memory

struct OnDevice {  // makes a device the current one
  DeviceIndex before = current_device;
  explicit OnDevice(std::optional<Device> device) {
    if (device && device->has_index()) current_device = device->index();
    TORCH_CHECK(current_device < device_count, "CUDA error: invalid device ordinal");
  }
  ~OnDevice() { current_device = before; }
};

static Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
    std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice guard(device);
  const DispatchKeySet key(DispatchKey::CUDA);
  Tensor made = at::detail::empty_generic(size, &device_allocator, key, c10::dtype_or_default(dtype), format);
  note_made(made);
  return made;
}

static Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  OnDevice guard(device);
  const DispatchKeySet key(DispatchKey::CUDA);
  Tensor made = at::detail::empty_strided_generic(size, stride, &device_allocator, key, c10::dtype_or_default(dtype));
  note_made(made);
  return made;
}

static Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  const bool is_upload = source.is_cpu(), is_download = self.is_cpu();
  const auto copy_memory = [](Tensor to, const Tensor& from) {
    at::AutoDispatchBelowADInplaceOrView below;
    host_alias(to).copy_(host_alias(from));
  };
  if (is_capturing) {
    TORCH_CHECK(!is_upload && !is_download, "virtual GPU: a copy to or from the host is captured");
    static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    Stack stack{self, source, non_blocking};
    run_on_host(op, &stack);
    return self;
  }

  const auto& host = is_upload ? source : self;
  const bool waits = self.numel() && (is_upload || is_download);
  if (!waits || !non_blocking || !is_pinned(host.const_data_ptr()) || !host.is_contiguous()) {
    if (waits) wait(is_upload ? "copy to the device" : "copy to the host");
    copy_memory(self, source);
  } else if (is_upload) {
    copy_memory(self, source);
    add_pending({source.detach(), source.detach().clone(), true});
  } else {
    auto value = at::empty_like(self);
    copy_memory(value, source);
    memset(self.mutable_data_ptr(), UNWRITTEN, self.nbytes());
    add_pending({self.detach(), value, false});
  }
  return self;
}

static at::Scalar local_scalar(const Tensor& self) {
  wait("item");
  return host_alias(self).item();
}

static void resize_storage(const Tensor& tensor, int64_t bytes) {  // of a tensor
  const auto& storage = tensor.storage();
  OnDevice guard(tensor.device());
  auto data = device_allocator.allocate(bytes);
  memcpy(data.get(), storage.data(), std::min<size_t>(bytes, storage.nbytes()));
  storage.set_data_ptr(std::move(data));
  storage.set_nbytes(bytes);
}

static const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const size_t bytes = (c10::multiply_integers(size) + self.storage_offset()) * self.itemsize();
  if (bytes > self.storage().nbytes()) resize_storage(self, bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

static Tensor& set_storage(
    Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  TORCH_CHECK(source.device().is_cuda(), "Expected storage of cuda:0, got one of ", source.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size() && !stride.empty()) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  return self;
}

static Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  const int64_t length = source.nbytes() / self.itemsize();
  return set_storage(self, std::move(source), 0, {length}, {});
}

static Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

static void record_stream(Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("record_stream", &record_stream);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
}

// ----------------------------------------------------------------------------------------------------------- Python

PYBIND11_MODULE(virtual_device, m) {
  c10::SetAllocator(CUDA, &device_allocator);
  m.def("set_reporter", [](py::object function) { reporter = function.release(); });
  m.def("set_device_count", [](int count) { device_count = static_cast<DeviceIndex>(count); });
  m.def("current_device", [] { return static_cast<int>(current_device); });
  m.def("set_device", [](int index) { current_device = static_cast<DeviceIndex>(index); });
  m.def("current_stream", [] { return static_cast<int64_t>(current_stream); });
  m.def("set_stream", [](int64_t stream) { current_stream = stream; });
  m.def("wait", &wait);
  m.def("host_alias", &host_alias);
  m.def("resize_storage", &resize_storage);
  m.def("allocated", [] { return bytes_now.load(); });
  m.def("peak", [] { return bytes_peak.load(); });
  m.def("reset_peak", [] { bytes_peak = bytes_now.load(); });
  m.def("is_capturing", [] { return is_capturing; });
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph").def(py::init<>());
  m.def("begin_capture", [](std::shared_ptr<Graph> graph) {
    TORCH_CHECK(!capturing, "only one capture may be underway at a time");
    capturing = std::move(graph);
    is_capturing = true;
  });
  m.def("end_capture", &end_capture);
  m.def("replay", [](const std::shared_ptr<Graph>& graph) { replay(*graph); });
}

}  // namespace virtual_gpu
