// A CUDA device without a GPU, for CPU builds of PyTorch. Read tests/fake_cuda/__init__.py first.
//
// Registers what a CUDA build registers for DeviceType::CUDA: device guard, allocators, generator, hooks, and one boxed
// kernel for every operator, which runs the CPU's kernel over the same memory. Autograd, autocast, dispatch and views are
// PyTorch's own and see tensors on "cuda".

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using namespace at;
using torch::jit::Stack;

constexpr int kMostDevices = 16;
constexpr size_t kBlockBytes = 512;                // CUDA's caching allocator rounds to this
constexpr size_t kFileBytes = size_t(1) << 21;     // from here on memory is a file, which other processes can map
constexpr size_t kPoisonedBytes = size_t(1) << 26; // larger memory is not filled: it takes too long

// ------------------------------------------------------------------------------------------------ state

thread_local DeviceIndex current_device = 0;
thread_local StreamId current_stream[kMostDevices] = {};
std::atomic<int64_t> next_stream{1}, allocated_bytes{0}, peak_bytes{0};
int64_t total_bytes = int64_t(8) << 30;
int num_devices = 1;

std::mutex mutex;  // of the two maps
std::map<char*, size_t> pinned;  // start and size of pinned host memory
struct Block { int file; size_t bytes; };  // file: -1 for memory that is not a file
std::map<void*, Block> blocks;

// ------------------------------------------------------------------------------------------------ graph capture

struct Recorded { c10::OperatorHandle op; Stack arguments, results; };
using Tape = std::vector<Recorded>;
std::map<int64_t, std::unique_ptr<Tape>> tapes;
thread_local Tape* capture = nullptr;    // the one that this thread is in
std::atomic<int> num_captures{0};        // of all threads
std::atomic<bool> is_capture_global{false};

// cudaMalloc, which fails in every other thread while one captures in mode "global".
void check_may_allocate() {
  TORCH_CHECK(capture || !num_captures || !is_capture_global, "CUDA error: operation not permitted when stream is "
              "capturing (cudaMalloc in another thread than that of a capture in mode global)");
}

// ------------------------------------------------------------------------------------------------ waits

void (*on_wait)(const char* operation) = nullptr;

// An operation for which the host waits until the device has finished.
void wait_for_device(const std::string& operation) {
  TORCH_CHECK(!capture, "CUDA error: operation not permitted when stream is capturing (", operation, ")");
  if (on_wait) on_wait(operation.c_str());
}

const std::set<std::string> kWaiting = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::equal", "aten::repeat_interleave.Tensor", "aten::bincount", "aten::_linalg_check_errors"};
// Operators that take host tensors beside those of the device, and wait for them.
const std::set<std::string> kTakingHostTensors = {
    "aten::index", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_pack_padded_sequence"};
const std::set<std::string> kProducts = {
    "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addmv", "aten::mv", "aten::dot"};
std::set<std::string> without_cuda_kernel;

// ------------------------------------------------------------------------------------------------ device guard

DeviceIndex index_of(Device device) { return device.index() < 0 ? current_device : device.index(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kCUDA; }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  Device getDevice() const override { return Device(kCUDA, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < num_devices, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index_of(device); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }

  Stream stream(Device device, StreamId id) const {
    return Stream(Stream::UNSAFE, Device(kCUDA, index_of(device)), id);
  }
  Stream getStream(Device device) const override { return stream(device, current_stream[index_of(device)]); }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getNewStream(Device device, int) const override { return stream(device, next_stream++); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream next) const override {
    Stream before = getStream(next.device());
    current_stream[next.device_index()] = next.id();
    return before;
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { wait_for_device("stream.synchronize"); }
  bool isStreamCapturing(const Stream&) const override { return capture != nullptr; }
  void synchronizeDevice(DeviceIndex) const override { wait_for_device("synchronize"); }

  // Kernels are done when they return, so an event has always happened.
  void record(void** event, const Stream&, DeviceIndex, EventFlag) const override { *event = reinterpret_cast<void*>(1); }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { wait_for_device("event.synchronize"); }
  double elapsedTime(void*, void*, DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// ------------------------------------------------------------------------------------------------ memory

int64_t rounded(size_t bytes) { return int64_t((bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes); }

void count_bytes(int64_t change) {
  int64_t now = allocated_bytes += change;
  if (change > 0 && now > total_bytes) {
    allocated_bytes -= change;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory (fake): tried to allocate ", change, " bytes");
  }
  if (now > peak_bytes) peak_bytes = now;
}

// Memory is filled with 0xFF, since that of a GPU holds old values.
struct DeviceAllocator final : c10::Allocator {
  static void free(void* memory) {
    Block block;
    {
      std::lock_guard<std::mutex> guard(mutex);
      block = blocks.at(memory);
      blocks.erase(memory);
    }
    if (block.file >= 0) {
      munmap(memory, block.bytes);
      close(block.file);
    } else {
      ::free(memory);
    }
    count_bytes(-int64_t(block.bytes));
  }
  c10::DataPtr allocate(size_t size) override {
    Device device(kCUDA, current_device);
    if (!size) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    check_may_allocate();
    size_t bytes = rounded(size);
    count_bytes(bytes);
    void* memory;
    int file = -1;
    if (bytes >= kFileBytes) {
      file = memfd_create("fake-cuda", 0);
      TORCH_CHECK(file >= 0 && !ftruncate(file, bytes), "no file for the memory of the fake device");
      memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      TORCH_CHECK(memory != MAP_FAILED, "no memory for the fake device");
    } else {
      memory = aligned_alloc(kBlockBytes, bytes);
    }
    if (bytes < kPoisonedBytes) memset(memory, 0xFF, bytes);
    std::lock_guard<std::mutex> guard(mutex);
    blocks[memory] = {file, bytes};
    return {memory, memory, &free, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};

struct PinnedAllocator final : c10::Allocator {
  static void free(void* memory) {
    {
      std::lock_guard<std::mutex> guard(mutex);
      pinned.erase(static_cast<char*>(memory));
    }
    ::free(memory);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = aligned_alloc(64, (bytes + 64) / 64 * 64);
    memset(memory, 0xFF, bytes);
    std::lock_guard<std::mutex> guard(mutex);
    pinned[static_cast<char*>(memory)] = std::max<size_t>(bytes, 1);
    return {memory, memory, &free, kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> guard(mutex);
  auto at = static_cast<const char*>(address);
  auto next = pinned.upper_bound(const_cast<char*>(at));
  if (next == pinned.begin()) return false;
  --next;
  return at < next->first + next->second;
}

// ------------------------------------------------------------------------------------------------ random numbers

// Draws the numbers of a CPU generator, which are not those of CUDA.
struct CudaGenerator final : c10::GeneratorImpl {
  Generator cpu;
  explicit CudaGenerator(DeviceIndex index)
      : GeneratorImpl(Device(kCUDA, index), DispatchKeySet(DispatchKey::CUDA)),
        cpu(at::detail::createCPUGenerator(default_rng_seed_val)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  CudaGenerator* clone_impl() const override {
    auto copy = new CudaGenerator(device().index());
    copy->cpu = cpu.clone();
    return copy;
  }
};

Generator& default_generator(DeviceIndex index) {
  static std::vector<Generator> generators = [] {
    std::vector<Generator> made;
    for (int i = 0; i < kMostDevices; ++i) made.push_back(at::make_generator<CudaGenerator>(i));
    return made;
  }();
  return generators[index < 0 ? current_device : index];
}

// ------------------------------------------------------------------------------------------------ hooks

struct Hooks final : CUDAHooksInterface {
  explicit Hooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  const Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<CudaGenerator>(index < 0 ? ::current_device : index);
  }
  Device getDeviceFromPtr(void*) const override { return Device(kCUDA, ::current_device); }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return num_devices; }
  int getNumGPUs() const override { return num_devices; }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice(Device(kCUDA, index)); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return Guard().exchangeDevice(Device(kCUDA, index)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  void deviceSynchronize(DeviceIndex) const override { wait_for_device("synchronize"); }
};

// PyTorch looks for these once, while it is imported, so the library is loaded before it.
const bool is_registered = [] {
  CUDAHooksRegistry()->Register("CUDAHooks", [](CUDAHooksArgs arguments) {
    return std::unique_ptr<CUDAHooksInterface>(new Hooks(arguments));
  });
  c10::SetAllocator(kCUDA, &device_allocator, 255);
  return true;
}();

// ------------------------------------------------------------------------------------------------ both sides of one memory

template <class T>
void delete_as(void* object) { delete static_cast<T*>(object); }

c10::Storage storage_over(const c10::Storage& owner, void* context, c10::DeleterFnPtr deleter, Device device,
                          c10::Allocator* allocator) {
  c10::DataPtr data(const_cast<void*>(owner.data_ptr().get()), context, deleter, device);
  return c10::Storage(c10::Storage::use_byte_size_t(), owner.nbytes(), std::move(data), allocator, true);
}

// A host storage over the memory of a device storage, which it keeps.
c10::Storage host_storage(const c10::Storage& device) {
  return storage_over(device, new c10::Storage(device), &delete_as<c10::Storage>, kCPU, c10::GetAllocator(kCPU));
}

struct CountedStorage {
  c10::Storage host;
  int64_t bytes;
  ~CountedStorage() { count_bytes(-bytes); }
};

// A device storage over the memory of a host storage, which it keeps; counted as allocated there.
c10::Storage device_storage(const c10::Storage& host) {
  check_may_allocate();
  int64_t bytes = rounded(host.nbytes());
  count_bytes(bytes);
  return storage_over(host, new CountedStorage{host, bytes}, &delete_as<CountedStorage>, Device(kCUDA, current_device),
                      &device_allocator);
}

// A tensor over `storage` with the sizes and flags of `like`; a view of `base`, if given.
Tensor tensor_like(const Tensor& like, c10::Storage storage, DispatchKey key, const Tensor& base = {}) {
  auto made = base.defined() ? at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage),
                                                                        base.key_set(), like.dtype())
                             : at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  auto impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  if (!like.dim()) impl->set_wrapped_number(like.unsafeGetTensorImpl()->is_wrapped_number());
  return made;
}

Tensor on_host(const Tensor& tensor) {
  return tensor.is_cuda() ? tensor_like(tensor, host_storage(tensor.storage()), DispatchKey::CPU) : tensor;
}

SparseTensorImpl* sparse(const Tensor& tensor) { return static_cast<SparseTensorImpl*>(tensor.unsafeGetTensorImpl()); }

// The tensors of one call of an operator: those of the device are lowered to the host, results are raised to the device.
// Tensors that share memory before share it afterwards.
class Call {
 public:
  explicit Call(std::string name) : name_(std::move(name)) {}

  int device = -1;             // of the arguments; -1 if none is on the device
  bool has_host_tensor = false;  // of one or more dimensions: a number may be on the host

  Tensor lower(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      has_host_tensor |= tensor.is_cpu() && tensor.dim() > 0;
      return tensor;
    }
    TORCH_CHECK(device < 0 || device == tensor.get_device(), "Expected all tensors to be on the same device, but found at "
                "least two devices, cuda:", device, " and cuda:", int(tensor.get_device()), "! (", name_, ")");
    device = tensor.get_device();
    for (auto& [original, lowered] : lowered_)
      if (original.is_same(tensor)) return lowered;
    if (tensor.layout() == kSparse) {
      auto impl = sparse(tensor);
      return at::_sparse_coo_tensor_unsafe(lower(impl->indices()), lower(impl->values()), tensor.sizes())
          ._coalesced_(impl->coalesced());
    }
    auto key = tensor.storage().unsafeGetStorageImpl();
    if (!hosts_.count(key)) {
      auto host = host_storage(tensor.storage());
      hosts_.emplace(key, host);
      devices_.emplace(host.unsafeGetStorageImpl(), tensor.storage());
      bases_.emplace(host.unsafeGetStorageImpl(), tensor);
    }
    auto made = tensor_like(tensor, hosts_.at(key), DispatchKey::CPU);
    lowered_.emplace_back(tensor, made);
    return made;
  }

  Tensor raise(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (auto& [original, lowered] : lowered_)
      if (lowered.is_same(tensor)) return original;
    if (tensor.layout() == kSparse) {
      auto from = sparse(tensor);
      auto made = at::detail::make_tensor<SparseTensorImpl>(DispatchKeySet(DispatchKey::SparseCUDA), tensor.dtype());
      sparse(made)->resize_(from->sparse_dim(), from->dense_dim(), tensor.sizes());
      sparse(made)->set_indices_and_values_unsafe(raise(from->indices()), raise(from->values()));
      sparse(made)->set_coalesced(from->coalesced());
      return made;
    }
    auto key = tensor.storage().unsafeGetStorageImpl();
    if (!devices_.count(key)) {
      devices_.emplace(key, device_storage(tensor.storage()));
      kept_.push_back(tensor.storage());  // so that the key is not that of a later storage
    }
    return tensor_like(tensor, devices_.at(key), DispatchKey::CUDA, bases_.count(key) ? bases_.at(key) : Tensor());
  }

  bool is_lowered(const Tensor& tensor) const {
    for (auto& [original, lowered] : lowered_)
      if (lowered.is_same(tensor)) return true;
    return false;
  }

  // Give arguments the sizes and memory that the operator gave those on the host (out=, resize_).
  void resize_arguments() {
    for (auto& [original, lowered] : lowered_) {
      auto impl = original.unsafeGetTensorImpl();
      if (lowered.storage().data() != original.storage().data())
        impl->set_storage_keep_dtype(device_storage(lowered.storage()));
      if (lowered.sizes() != original.sizes() || lowered.strides() != original.strides())
        impl->set_sizes_and_strides(lowered.sizes(), lowered.strides(), lowered.storage_offset());
    }
  }

  bool takes_integers() const {
    if (lowered_.empty()) return false;
    auto type = lowered_[0].first.scalar_type();
    return !isFloatingType(type) && !isComplexType(type);
  }

 private:
  std::string name_;
  std::vector<std::pair<Tensor, Tensor>> lowered_;      // of the device, on the host
  std::map<c10::StorageImpl*, c10::Storage> hosts_;     // by device storage
  std::map<c10::StorageImpl*, c10::Storage> devices_;   // by host storage
  std::map<c10::StorageImpl*, Tensor> bases_;           // by host storage
  std::vector<c10::Storage> kept_;
};

// `change` applied to each tensor of a value.
template <class F>
IValue each_tensor(const IValue& value, F change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    std::vector<Tensor> changed;
    for (auto& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    return IValue(changed);
  }
  if (value.isList() && !value.toListRef().empty() &&
      value.type()->cast<c10::ListType>()->getElementType()->kind() == c10::TypeKind::OptionalType) {
    c10::List<std::optional<Tensor>> changed;
    for (auto& element : value.toListRef())
      changed.push_back(element.isTensor() ? std::optional<Tensor>(change(element.toTensor())) : std::nullopt);
    return IValue(changed);
  }
  return value;
}

// ------------------------------------------------------------------------------------------------ operators

// The kernel of every operator without one of its own.
void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  auto& schema = op.schema();
  auto plain = schema.name();
  auto full = schema.overload_name().empty() ? plain : plain + "." + schema.overload_name();
  TORCH_CHECK_NOT_IMPLEMENTED(!without_cuda_kernel.count(full), "Could not run '", full,
                              "' with arguments from the 'CUDA' backend (no CUDA kernel)");
  const auto num_arguments = schema.arguments().size();
  const auto first = stack->size() - num_arguments;
  Call call(full);
  bool makes_device_tensor = false, has_mask = false;
  for (size_t i = 0; i < num_arguments; ++i) {
    auto& value = (*stack)[first + i];
    auto kind = schema.arguments()[i].type()->str();
    if (value.isDevice() && value.toDevice().is_cuda()) {
      if (value.toDevice().index() >= 0) current_device = value.toDevice().index();
      value = Device(kCPU);
      makes_device_tensor = true;
    } else if (kind == "Generator?" || kind == "Generator") {
      auto generator = value.isNone() ? default_generator(-1) : value.toGenerator();
      TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
      value = static_cast<CudaGenerator*>(generator.unsafeGetGeneratorImpl())->cpu;
    } else {
      value = each_tensor(value, [&](const Tensor& tensor) {
        auto type = tensor.defined() ? tensor.scalar_type() : kFloat;
        has_mask |= i == 1 && (type == kBool || type == kByte);
        return call.lower(tensor);
      });
    }
  }
  const bool takes_host = kTakingHostTensors.count(plain);
  if (has_mask && num_arguments > 3 && plain != "aten::index") {  // a number written at a mask is masked_fill
    auto& written = (*stack)[first + 2];
    has_mask = !(written.isTensor() && written.toTensor().dim() == 0 && !call.is_lowered(written.toTensor()));
  }
  TORCH_CHECK(!call.has_host_tensor || call.device < 0 || takes_host, "Expected all tensors to be on the same device, but "
              "found at least two devices, cuda:", call.device, " and cpu! (", full, ")");
  if (kWaiting.count(full) || kWaiting.count(plain)) wait_for_device(full);
  else if (takes_host && has_mask) wait_for_device(full + " with a mask");
  else if (takes_host && call.has_host_tensor) wait_for_device(full + " with indices on the host");
  TORCH_CHECK(!kProducts.count(plain) || !call.takes_integers(), '"', plain, "_cuda\" not implemented for integers");

  Stack arguments;
  if (capture) arguments.assign(stack->begin() + first, stack->end());
  op.callBoxed(*stack);
  call.resize_arguments();
  const auto num_results = schema.returns().size();
  if (capture) capture->push_back({op, arguments, Stack(stack->end() - num_results, stack->end())});
  for (size_t i = stack->size() - num_results; i < stack->size(); ++i)
    (*stack)[i] = each_tensor((*stack)[i], [&](const Tensor& tensor) {
      return call.device < 0 && !makes_device_tensor ? tensor : call.raise(tensor);
    });
}

// Run the operators of a capture again on the same memory; results of new memory are copied to where the capture put them.
void replay(int64_t id) {
  auto copy = [](const Tensor& to, const Tensor& from) {
    if (to.defined() && to.data_ptr() != from.data_ptr()) to.copy_(from);
  };
  for (auto& recorded : *tapes.at(id)) {
    Stack stack = recorded.arguments;
    recorded.op.callBoxed(stack);
    for (size_t i = 0; i < recorded.results.size(); ++i) {
      auto& result = recorded.results[i];
      if (result.isTensor()) copy(result.toTensor(), stack[i].toTensor());
      if (!result.isTensorList()) continue;
      auto to = result.toTensorVector(), from = stack[i].toTensorVector();
      for (size_t k = 0; k < to.size(); ++k) copy(to[k], from[k]);
    }
  }
}

// Copies wait unless they are asynchronous: to the device if so asked, to the host only into pinned memory.
Tensor& copy_into(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_cuda() && source.is_cuda()) {
    static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    Stack stack{on_host(self), on_host(source), non_blocking};
    if (capture) capture->push_back({op, stack, Stack{stack[0]}});
    op.callBoxed(stack);
    return self;
  }
  const bool is_host_pinned = is_pinned((self.is_cuda() ? source : self).const_data_ptr());
  if (self.numel() && !(non_blocking && (self.is_cuda() || is_host_pinned)))
    wait_for_device(!self.is_cuda()    ? "copy to host"
                    : is_host_pinned ? "copy to device (pinned, but blocking)"
                                     : "copy to device");
  TORCH_CHECK(!capture || is_host_pinned,
              "CUDA error: operation not permitted when stream is capturing (copy of pageable memory)");
  on_host(self).copy_(on_host(source));
  return self;
}

using OptionalType = std::optional<ScalarType>;
using OptionalDevice = std::optional<Device>;

ScalarType type_or_default(OptionalType type) { return type.value_or(typeMetaToScalarType(get_default_dtype())); }

Tensor empty(c10::SymIntArrayRef size, OptionalType type, std::optional<Layout>, OptionalDevice device,
             std::optional<bool> is_pinned, std::optional<MemoryFormat> format) {
  TORCH_CHECK(!is_pinned.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device.value_or(Device(kCUDA, current_device)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator, DispatchKeySet(DispatchKey::CUDA),
                                   type_or_default(type), format);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, OptionalType type, std::optional<Layout>,
                     OptionalDevice device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(kCUDA, current_device)));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator,
                                           DispatchKeySet(DispatchKey::CUDA), type_or_default(type));
}

Tensor& set_storage_view(Tensor& self, Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                         c10::SymIntArrayRef stride) {
  auto impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  } else {
    impl->set_storage_offset(offset.expect_int());
    impl->set_sizes_contiguous(sizes);
  }
  return self;
}
Tensor& set_storage(Tensor& self, Storage storage) {
  auto impl = self.unsafeGetTensorImpl();
  int64_t length = storage.nbytes() / self.itemsize();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({length});
  return self;
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  auto impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}
void record_stream(Tensor&, Stream) {}

// Products whose result has a type of its own (torch.mm with out_dtype).
void check_out_type(const Tensor& a, ScalarType type) {
  const bool is_half = a.scalar_type() == kHalf || a.scalar_type() == kBFloat16;
  TORCH_CHECK(type == a.scalar_type() || (type == kFloat && is_half),
              "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs");
}
Tensor mm(const Tensor& a, const Tensor& b, ScalarType type) {
  check_out_type(a, type);
  return at::mm(a.to(type), b.to(type));
}
Tensor bmm(const Tensor& a, const Tensor& b, ScalarType type) {
  check_out_type(a, type);
  return at::bmm(a.to(type), b.to(type));
}
Tensor addmm(const Tensor& c, const Tensor& a, const Tensor& b, ScalarType type, const Scalar& beta, const Scalar& alpha) {
  check_out_type(a, type);
  return at::addmm(c.to(type), a.to(type), b.to(type), beta, alpha);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }
TORCH_LIBRARY_IMPL(_, SparseCUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }
TORCH_LIBRARY_IMPL(aten, SparseCUDA, m) {
  m.impl("is_coalesced", [](const Tensor& tensor) { return sparse(tensor)->coalesced(); });
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_into);
  m.impl("set_.source_Storage_storage_offset", set_storage_view);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("mm.dtype", mm);
  m.impl("bmm.dtype", bmm);
  m.impl("addmm.dtype", addmm);
}

// ------------------------------------------------------------------------------------------------ for Python

void resize_storage(const Tensor& tensor, int64_t bytes) {
  auto storage = tensor.storage().unsafeGetStorageImpl();
  auto memory = device_allocator.allocate(bytes);
  if (auto kept = std::min<size_t>(bytes, storage->nbytes())) memcpy(memory.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
}

// The file of a tensor's memory, its size, and that of the tensor's storage: another process can map it.
std::vector<int64_t> export_file(const Tensor& tensor) {
  std::lock_guard<std::mutex> guard(mutex);
  auto& block = blocks.at(const_cast<void*>(tensor.storage().data()));
  TORCH_CHECK(block.file >= 0, "fake CUDA IPC needs memory of ", kFileBytes, " bytes or more");
  return {block.file, int64_t(block.bytes), int64_t(tensor.storage().nbytes())};
}
Tensor import_file(const Tensor& mapped, int64_t index) {
  c10::DeviceGuard guard(Device(kCUDA, index));
  return tensor_like(mapped, device_storage(mapped.storage()), DispatchKey::CUDA);
}

void begin_capture(int64_t id, bool is_global) {
  TORCH_CHECK(!capture, "this thread is capturing already");
  is_capture_global = is_global;
  tapes[id] = std::make_unique<Tape>();
  capture = tapes[id].get();
  ++num_captures;
}
void end_capture() {
  capture = nullptr;
  --num_captures;
}

TORCH_LIBRARY(fake_cuda, m) {
  constexpr auto kEither = DispatchKey::CompositeExplicitAutograd;
  m.def("setup(int bytes, int devices, str[] without_kernel) -> ()",
        [](int64_t bytes, int64_t devices, std::vector<std::string> names) {
          total_bytes = bytes;
          num_devices = devices;
          without_cuda_kernel.insert(names.begin(), names.end());
        });
  m.def("on_wait(int function) -> ()", [](int64_t function) { on_wait = reinterpret_cast<void (*)(const char*)>(function); });
  m.def("wait(str operation) -> ()", [](std::string operation) { wait_for_device(operation); });
  m.def("counts() -> int[]",
        [] { return std::vector<int64_t>{allocated_bytes, peak_bytes}; });
  m.def("reset_peak() -> ()", [] { peak_bytes = allocated_bytes.load(); });
  m.def("device() -> int", [] { return int64_t(current_device); });
  m.def("set_device(int index) -> int",
        [](int64_t index) { return int64_t(Guard().exchangeDevice(Device(kCUDA, index)).index()); });
  m.def("seed(int seed) -> ()", [](int64_t seed) {
    for (int i = 0; i < num_devices; ++i) default_generator(i).set_current_seed(seed);
  });
  m.def("pin(int address, int bytes) -> ()", [](int64_t address, int64_t bytes) {
    std::lock_guard<std::mutex> guard(mutex);
    if (bytes) pinned[reinterpret_cast<char*>(address)] = bytes;
    else pinned.erase(reinterpret_cast<char*>(address));
  });
  m.def("begin_capture(int id, bool is_global) -> ()", begin_capture);
  m.def("end_capture() -> ()", end_capture);
  m.def("is_capturing() -> bool", [] { return capture != nullptr; });
  m.def("replay(int id) -> ()", replay);
  m.def("forget(int id) -> ()", [](int64_t id) { tapes.erase(id); });
  m.def("host(Tensor tensor) -> Tensor", torch::dispatch(kEither, on_host));
  m.def("resize_storage(Tensor tensor, int bytes) -> ()", torch::dispatch(kEither, resize_storage));
  m.def("export_file(Tensor tensor) -> int[]", torch::dispatch(kEither, export_file));
  m.def("import_file(Tensor mapped, int device) -> Tensor", torch::dispatch(kEither, import_file));
}

}  // namespace
