// The Python face of the native core: converts arguments, lets go of the interpreter lock, converts results and errors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arena.hpp"
#include "dlpack.hpp"
#include "engine.hpp"
#include "kernels.hpp"
#include "parallel.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace ssdplan {
namespace {

// ---- Arena ----------------------------------------------------------------------------------------------------------

// One exported view. It keeps the mapping alive until the consumer calls the deleter.
struct Export {
    explicit Export(std::shared_ptr<Mapping> mapping_) : mapping(std::move(mapping_)) {
        shape = static_cast<std::int64_t>(mapping->nbytes());
        managed.tensor = {mapping->data(), {dlpack::kCpu, 0}, 1, {dlpack::kUnsigned, 8, 1}, &shape, &stride, 0};
        managed.manager_context = this;
        managed.deleter = [](dlpack::ManagedTensor* self) {
            const std::unique_ptr<Export> owner(static_cast<Export*>(self->manager_context));
        };
        mapping->exports.fetch_add(1);
    }
    Export(const Export&) = delete;
    Export& operator=(const Export&) = delete;
    ~Export() { mapping->exports.fetch_sub(1); }

    std::shared_ptr<Mapping> mapping;
    std::int64_t shape = 0;
    std::int64_t stride = 1;
    dlpack::ManagedTensor managed{};
};

constexpr const char* kCapsuleName = "dltensor";

// A capsule that nobody consumed still owns its view; a consumed one was renamed.
void destroy_capsule(PyObject* capsule) {
    if (PyCapsule_IsValid(capsule, kCapsuleName) == 0) return;
    auto* const managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule, kCapsuleName));
    managed->deleter(managed);
}

py::object export_arena(const Arena& arena, const py::object& stream, const py::object& /* max_version */,
                        const std::optional<std::pair<int, int>>& device, const std::optional<bool>& copy) {
    if (!stream.is_none()) throw py::buffer_error("an arena is CPU memory: stream must be None");
    if (device && *device != std::pair<int, int>{dlpack::kCpu, 0}) {
        throw py::buffer_error("an arena is CPU memory: it cannot be exported to another device");
    }
    if (copy.value_or(false)) throw py::buffer_error("an arena is exported without a copy only");
    auto view = std::make_unique<Export>(arena.share());
    PyObject* const capsule = PyCapsule_New(&view->managed, kCapsuleName, destroy_capsule);
    if (capsule == nullptr) throw py::error_already_set();
    (void)view.release();  // the capsule, and then its consumer, calls the deleter
    return py::reinterpret_steal<py::object>(capsule);
}

void bind_arena(py::module_& module) {
    py::class_<Arena>(module, "Arena", R"(One block of host memory of exactly the size asked for.

An anonymous mapping whose size is `nbytes` rounded up to one page and nothing more (torch's page-locked allocator
rounds to a power of two; see MemAscend on exact page-locked allocation). Its start is aligned to 2 MiB when it is at
least that long, huge pages are asked for, every page is touched at creation, and it is page-locked where
RLIMIT_MEMLOCK allows; where not, `locked` is False and `lock_error` says why. A forked child does not inherit it.

`torch.from_dlpack(arena)` is a uint8 tensor of shape (nbytes,) on it, without a copy. Such views are counted: `close`
refuses while one is alive, and the memory itself outlives the arena for as long as one is. It starts zeroed.)")
        .def(py::init([](std::int64_t nbytes, bool lock) {
                 const py::gil_scoped_release release;  // touching many pages takes seconds
                 return std::make_unique<Arena>(nbytes, lock);
             }),
             "nbytes"_a, py::kw_only(), "lock"_a = true,
             R"(Map, touch and (with `lock`) page-lock `nbytes` bytes.

Raises ValueError when nbytes is not positive, and MemoryError, naming nbytes, when it is more than the system or this
process's control group has left.)")
        .def_property_readonly("nbytes", &Arena::nbytes, "The size in bytes, as asked for.")
        .def_property_readonly("address", &Arena::address, "The address of the first byte. RuntimeError when closed.")
        .def_property_readonly("locked", &Arena::locked, "Whether it is page-locked. RuntimeError when closed.")
        .def_property_readonly("lock_error", &Arena::lock_error,
                               "Why it is not page-locked; empty when it is. RuntimeError when closed.")
        .def_property_readonly("exports", &Arena::exports, "How many exported views are alive.")
        .def("__dlpack__", &export_arena, py::kw_only(), "stream"_a = py::none(), "max_version"_a = py::none(),
             "dl_device"_a = py::none(), "copy"_a = py::none(),
             "A DLPack capsule: uint8, shape (nbytes,), CPU, never a copy. BufferError for anything else.")
        .def(
            "__dlpack_device__", [](const Arena&) { return std::pair<int, int>{dlpack::kCpu, 0}; },
            "(1, 0): the CPU, in DLPack's terms.")
        .def("close", &Arena::close,
             "Give the memory back. RuntimeError while exported views are alive; closing twice is nothing.");
}

// ---- Engine ---------------------------------------------------------------------------------------------------------

using SegmentTuple = std::tuple<std::int64_t, std::int64_t, std::uintptr_t, std::int64_t>;

std::shared_ptr<Request> submit(Engine& engine, Direction direction, const std::vector<SegmentTuple>& tuples) {
    std::vector<Segment> segments;
    segments.reserve(tuples.size());
    for (const auto& [file, offset, address, nbytes] : tuples) segments.push_back({file, offset, address, nbytes});
    const py::gil_scoped_release release;
    return engine.submit(direction, segments);
}

// Closing waits for the drive, which must not hold up other Python threads.
struct CloseWithoutLock {
    void operator()(Engine* engine) const {
        const py::gil_scoped_release release;
        const std::unique_ptr<Engine> owner(engine);
    }
};

using ReleaseLock = py::call_guard<py::gil_scoped_release>;

void bind_engine(py::module_& module) {
    py::class_<Request, std::shared_ptr<Request>>(module, "Request", R"(A read or write under way.

Dropping it without `wait` is safe for the engine, but the transfer goes on: the memory that it targets must stay valid
until it is done.)")
        .def("wait", &Request::wait, ReleaseLock(),
             R"(Wait until no block of the request is in flight, and return its bytes.

Raises IoError for the first block that failed. May be called again, and from several threads.)")
        .def("done", &Request::done, ReleaseLock(), "Whether `wait` would return, or raise, at once.")
        .def_property_readonly("nbytes", &Request::nbytes, "The bytes asked for, over all segments.");

    py::class_<Engine, std::unique_ptr<Engine, CloseWithoutLock>>(module, "Engine", R"(Asynchronous direct I/O.

Files are opened with O_DIRECT and named by small integers. `read` and `write` return at once; any number of requests,
from any threads, may be in flight. Requests run in no particular order: wait for a write before reading it back. Short
transfers are resubmitted and every result is checked.

A segment is (file, offset, address, nbytes): the file id, and three numbers of bytes that are multiples of 4096. The
memory must stay valid, and a source unchanged, until the request is done.)")
        .def(py::init([](const std::string& kind, std::int64_t queue_depth, std::int64_t block_bytes,
                         std::int64_t threads) {
                 return std::unique_ptr<Engine, CloseWithoutLock>(new Engine(kind, queue_depth, block_bytes, threads));
             }),
             "kind"_a = "auto", py::kw_only(), "queue_depth"_a = 32, "block_bytes"_a = std::int64_t{1} << 20,
             "threads"_a = 4,
             R"(Start an engine.

kind is "io_uring", "threads" (pread and pwrite from `threads` threads) or "auto": io_uring where a real read through it
succeeds, else threads. The environment variable SSDPLAN_IO_ENGINE overrides "auto". Requests are split into blocks of
block_bytes (a multiple of 4096), of which at most queue_depth are in flight at a time over all requests.

Raises ValueError for a kind or a number out of range, and IoError when "io_uring" is asked for and not to be had.)")
        .def_property_readonly("kind", &Engine::kind, "What was chosen: \"io_uring\" or \"threads\".")
        .def(
            "open",
            [](Engine& engine, const std::filesystem::path& path, std::optional<std::int64_t> create_bytes,
               bool read_only) {
                const py::gil_scoped_release release;
                return engine.open(path.string(), create_bytes, read_only);
            },
            "path"_a, py::kw_only(), "create_bytes"_a = py::none(), "read_only"_a = false,
            R"(Open a file or a block device for direct I/O and return its id.

With create_bytes the file must not exist: it is made with that size, and its space is allocated, so that a full disk is
ENOSPC here and not later; when that fails no file is left. Its directory is not flushed.

Raises IoError (EINVAL where the file system cannot do direct I/O) and ValueError.)")
        .def("size", &Engine::size, "file"_a, ReleaseLock(), "The size in bytes of an open file or block device.")
        .def(
            "read",
            [](Engine& engine, const std::vector<SegmentTuple>& segments) {
                return submit(engine, Direction::read, segments);
            },
            "segments"_a,
            R"(Start reading each segment's bytes into its memory.

A read that meets the end of its file fails with ENODATA. Raises ValueError, before anything is started, for a segment
that is misaligned, negative or null or names no open file, and RuntimeError when the engine is closed.)")
        .def(
            "write",
            [](Engine& engine, const std::vector<SegmentTuple>& segments) {
                return submit(engine, Direction::write, segments);
            },
            "segments"_a,
            R"(Start writing each segment's memory to its file. Raises as `read` does.

What was written is durable only after `wait` and then `flush`.)")
        .def("flush", &Engine::flush, "file"_a, ReleaseLock(),
             R"(Make the finished writes of a file durable (fdatasync), waiting for the drive.

Raises IoError. A failed flush is never retried: what the kernel dropped cannot be flushed any more, so every later
flush of the same file raises the same error.)")
        .def("close_file", &Engine::close_file, "file"_a, ReleaseLock(),
             "Wait for what is in flight on a file, then close it. Raises IoError, and ValueError for an unknown id.")
        .def("close", &Engine::close, ReleaseLock(),
             "Wait for everything in flight, then close all files. Closing twice is nothing.");
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

void bind_kernels(py::module_& module) {
    module.def(
        "adamw",
        [](std::uintptr_t master, std::uintptr_t exp_avg, std::uintptr_t exp_avg_sq, std::uintptr_t gradient,
           std::uintptr_t parameter, const std::string& parameter_dtype, std::int64_t elements, double lr, double beta1,
           double beta2, double eps, double weight_decay, std::int64_t step, double gradient_scale,
           std::int64_t threads) {
            const AdamwArguments arguments{master,     exp_avg,
                                           exp_avg_sq, gradient,
                                           parameter,  parse_dtype(parameter_dtype),
                                           elements,   lr,
                                           beta1,      beta2,
                                           eps,        weight_decay,
                                           step,       gradient_scale};
            const py::gil_scoped_release release;
            const GradientStatistics statistics = parallel_adamw(arguments, threads);
            return std::pair<bool, double>{statistics.finite, statistics.sum_of_squares};
        },
        "master"_a, "exp_avg"_a, "exp_avg_sq"_a, "gradient"_a, "parameter"_a, "parameter_dtype"_a, "elements"_a,
        py::kw_only(), "lr"_a, "beta1"_a, "beta2"_a, "eps"_a, "weight_decay"_a, "step"_a, "gradient_scale"_a = 1.0,
        "threads"_a = 2,
        R"(One AdamW step on a range of elements, in one pass over memory.

master, exp_avg, exp_avg_sq: addresses of fp32 arrays, updated in place. gradient: address of an fp32 array, only read.
parameter: address of an array of parameter_dtype ("bf16", "fp16" or "fp32") that receives the new master weights,
rounded to nearest even. All have `elements` elements; parameter may be master when both are fp32. `step` counts from 1.
The gradient is multiplied by gradient_scale first.

The arithmetic is torch.optim.AdamW's without amsgrad, in fp32, its scalars computed in float64 and rounded once. An
element's result has the same bits in whatever range it lies, on any instruction set and number of threads (only the
payload of a NaN may differ).

Returns (finite, sum_of_squares): whether every scaled gradient is finite, by its exponent bits, fused into the pass
(MemAscend's overflow check); and the float64 sum of their squares, over blocks of 2048 elements in order, so that the
number of threads does not change it. The update is made in either case.

Raises ValueError for a null or misaligned pointer, a negative size or a hyperparameter out of range.)");
    module.def(
        "gradient_statistics",
        [](std::uintptr_t gradient, std::int64_t elements, std::int64_t threads) {
            GradientStatistics statistics{};
            {
                const py::gil_scoped_release release;
                statistics = parallel_statistics(gradient, elements, threads);
            }
            return std::pair<bool, double>{statistics.finite, statistics.sum_of_squares};
        },
        "gradient"_a, "elements"_a, py::kw_only(), "threads"_a = 1,
        R"(What `adamw` returns of a gradient, without an update: (finite, sum_of_squares).

gradient: address of an fp32 array of `elements` elements. Raises ValueError as `adamw`.)");
    module.def(
        "copy",
        [](std::uintptr_t destination, std::uintptr_t source, std::int64_t nbytes, std::int64_t threads) {
            parallel_copy(destination, source, nbytes, threads);
        },
        "destination"_a, "source"_a, "nbytes"_a, py::kw_only(), "threads"_a = 1, ReleaseLock(),
        "Copy nbytes bytes between two addresses. Raises ValueError for a null pointer, a negative size or an "
        "overlap.");
    module.def(
        "convert",
        [](std::uintptr_t destination, const std::string& destination_dtype, std::uintptr_t source,
           const std::string& source_dtype, std::int64_t elements, std::int64_t threads) {
            parallel_convert(destination, parse_dtype(destination_dtype), source, parse_dtype(source_dtype), elements,
                             threads);
        },
        "destination"_a, "destination_dtype"_a, "source"_a, "source_dtype"_a, "elements"_a, py::kw_only(),
        "threads"_a = 1, ReleaseLock(),
        R"(Convert elements among "fp32", "bf16" and "fp16".

Rounds to nearest even; overflow gives infinity, subnormals are kept and NaN stays NaN. Raises ValueError for a null or
misaligned pointer, a negative size, an unknown dtype or an overlap.)");
    module.def(
        "is_finite",
        [](std::uintptr_t address, std::int64_t elements, const std::string& dtype, std::int64_t threads) {
            return parallel_is_finite(address, elements, parse_dtype(dtype), threads);
        },
        "address"_a, "elements"_a, "dtype"_a, "threads"_a = 1, ReleaseLock(),
        R"(Whether no element of an array of dtype "fp32", "bf16" or "fp16" is infinite or NaN.

Looks at exponent bits alone and needs no memory (MemAscend's fused overflow check). Raises ValueError as `convert`.)");
    module.def("isa", &isa,
               R"(The instruction set that the kernels use here: "x86-64-v4", "x86-64-v3" or "baseline".)");
}

// ---- Errors ---------------------------------------------------------------------------------------------------------

void raise_io_error(const IoFailure& failure) {
    const py::object type = py::module_::import("ssdplan.native.errors").attr("IoError");
    // File names are bytes to the system and need not be text.
    const auto path = py::reinterpret_steal<py::object>(
        PyUnicode_DecodeFSDefaultAndSize(failure.path.data(), static_cast<py::ssize_t>(failure.path.size())));
    if (!path) throw py::error_already_set();
    const py::object error = type(failure.code, failure.message_, path);
    error.attr("offset") = failure.offset;
    error.attr("nbytes") = failure.nbytes;
    PyErr_SetObject(type.ptr(), error.ptr());
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "The native core of ssdplan; its public face is ssdplan.native.";
    py::register_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) std::rethrow_exception(pointer);
        } catch (const IoFailure& failure) {
            raise_io_error(failure);
        }
    });
    bind_arena(module);
    bind_engine(module);
    bind_kernels(module);
}

}  // namespace ssdplan
