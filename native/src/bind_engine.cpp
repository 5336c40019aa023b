// The Python face of the engine: requests of segments, waited for without the interpreter lock.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "engine.hpp"
#include "summed.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace ssdplan {
namespace {

using SegmentTuple = std::tuple<std::int64_t, std::int64_t, std::uintptr_t, std::int64_t>;

std::vector<Segment> segments_of(const std::vector<SegmentTuple>& tuples) {
    std::vector<Segment> segments;
    segments.reserve(tuples.size());
    for (const auto& [file, offset, address, nbytes] : tuples) segments.push_back({file, offset, address, nbytes});
    return segments;
}

std::shared_ptr<Request> submit(Engine& engine, Direction direction, const std::vector<SegmentTuple>& tuples,
                                bool urgent) {
    const std::vector<Segment> segments = segments_of(tuples);
    const py::gil_scoped_release release;
    return engine.submit(direction, segments, urgent);
}

std::vector<std::uint64_t> summed(Engine& engine, Direction direction,
                                  const std::vector<std::vector<SegmentTuple>>& tuples, bool urgent) {
    std::vector<std::vector<Segment>> ranges;
    ranges.reserve(tuples.size());
    for (const std::vector<SegmentTuple>& range : tuples) ranges.push_back(segments_of(range));
    const py::gil_scoped_release release;
    return transfer_summed(engine, direction, ranges, urgent);
}

// The bytes of a str, bytes or os.PathLike. File names are bytes to the system and need not be text.
std::string path_name(const py::object& path) {
    PyObject* encoded = nullptr;
    if (PyUnicode_FSConverter(path.ptr(), &encoded) == 0) throw py::error_already_set();
    return py::reinterpret_steal<py::bytes>(encoded);
}

// Closing waits for the drive, which must not hold up other Python threads.
struct CloseWithoutLock {
    void operator()(Engine* engine) const {
        const py::gil_scoped_release release;
        const std::unique_ptr<Engine> owner(engine);
    }
};

void raise_io_error(const IoFailure& failure) {
    const auto path = py::reinterpret_steal<py::object>(
        PyUnicode_DecodeFSDefaultAndSize(failure.path.data(), static_cast<py::ssize_t>(failure.path.size())));
    if (!path) throw py::error_already_set();
    const py::object error =
        py::module_::import("ssdplan.native.errors")
            .attr("io_error")(failure.code, failure.message_, path, failure.offset, failure.nbytes);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
}

}  // namespace

void bind_engine(py::module_& module) {
    py::register_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) std::rethrow_exception(pointer);
        } catch (const IoFailure& failure) {
            raise_io_error(failure);
        }
    });

    py::class_<Request, std::shared_ptr<Request>>(module, "Request", R"(A read or write under way.

Dropping it without `wait` is safe for the engine, but the transfer goes on: the memory that it targets must stay valid
until it is done.)")
        .def("wait", &Request::wait, ReleaseLock(),
             R"(Wait until no block of the request is in flight, and return its bytes.

Raises the IoError of the first block that failed. May be called again, and from several threads.)")
        .def("done", &Request::done, ReleaseLock(), "Whether `wait` would return, or raise, at once.")
        .def_property_readonly("nbytes", &Request::nbytes, "The bytes asked for, over all segments.");

    py::class_<Engine, std::unique_ptr<Engine, CloseWithoutLock>>(module, "Engine", R"(Asynchronous direct I/O.

Files are opened with O_DIRECT and named by small integers. `read` and `write` return at once; any number of requests,
from any threads, may be in flight. Requests run in no particular order: wait for a write before reading it back. Short
transfers are resubmitted and every result is checked.

A segment is (file, offset, address, nbytes): the file id, and three numbers of bytes that are multiples of 4096. The
memory must stay valid, and a source unchanged, until the request is done.)")
        .def(py::init([](const std::string& kind, std::int64_t queue_depth, std::int64_t block_bytes,
                         std::int64_t threads, const std::string& polling,
                         const std::vector<std::pair<std::int64_t, std::string>>& faults) {
                 return std::unique_ptr<Engine, CloseWithoutLock>(
                     new Engine(kind, queue_depth, block_bytes, threads, polling, faults));
             }),
             "kind"_a = "auto", py::kw_only(), "queue_depth"_a = 16, "block_bytes"_a = std::int64_t{1} << 20,
             "threads"_a = 4, "polling"_a = "auto", "faults"_a = std::vector<std::pair<std::int64_t, std::string>>(),
             R"(Start an engine.

kind is "io_uring", "threads" (pread and pwrite from `threads` threads) or "auto": io_uring where a real read through it
succeeds, else threads. The environment variable SSDPLAN_IO_ENGINE overrides "auto". Requests are split into blocks of
block_bytes (a multiple of 4096), of which at most queue_depth are in flight at a time over all requests. Sixteen of 1
MiB keep a drive busy. With more, drives that report what has ended only when they have nothing left to do report later,
and what is done with the first blocks overlaps with less of the transfer.

Where a drive has poll queues, and a read through them succeeds, a second io_uring of the same depth asks it for
completions instead of waiting for interrupts, which takes a core while transfers are in flight and nothing otherwise.
polling is "auto", "off", or for tests "try", which tries every drive, whether it says that it has such queues or not,
and "pretend", which gives every file to the thread that would poll, on an io_uring that waits for interrupts.

faults are for tests: pairs (n, kind), of which the n-th block transfer that the engine starts suffers, counted from 0
over both directions (`transfers` tells how many a run starts). An errno ("EIO", "ENOSPC", "EINVAL", "ENODEV",
"EAGAIN", "EINTR") is returned without a transfer; "short" transfers only a part, and the rest is a transfer of its own;
"delay" starts 20 ms later, while others overtake; "flush" fails the n-th flush instead, with EIO.

Raises ValueError for a kind or a number out of range, and IoError when "io_uring" is asked for and not to be had.)")
        .def_property_readonly("kind", &Engine::kind, "What was chosen: \"io_uring\" or \"threads\".")
        .def_property_readonly("description", py::cpp_function(&Engine::description, ReleaseLock()),
                               "One line for people: what was chosen, and what of it is in use.")
        .def_property_readonly("transfers", &Engine::transfers,
                               "How many block transfers were started; what is left of a short one counts anew.")
        .def("register", &Engine::register_memory, "address"_a, "nbytes"_a, ReleaseLock(),
             R"(Have io_uring keep memory at hand for transfers that lie in it, which saves work on each of them.

Returns "" or, where that is not to be had, why: RLIMIT_MEMLOCK (registered memory counts against it), the kernel, the
kind of the engine, memory that is registered in part already. Nothing else changes then: transfers work with any
memory. Safe while transfers are in flight. The memory must stay mapped until `unregister` or `close`.

Raises ValueError for a null address or nbytes that is not positive, and RuntimeError when the engine is closed.)")
        .def("unregister", &Engine::unregister_memory, "address"_a, ReleaseLock(),
             "Undo `register` of the same address. Nothing where nothing is registered, or the engine is closed.")
        .def(
            "open",
            [](Engine& engine, const py::object& path, std::optional<std::int64_t> create_bytes, bool read_only,
               std::optional<int> descriptor) {
                const std::string name = path_name(path);
                const py::gil_scoped_release release;
                return engine.open(name, create_bytes, read_only, descriptor);
            },
            "path"_a, py::kw_only(), "create_bytes"_a = py::none(), "read_only"_a = false, "descriptor"_a = py::none(),
            R"(Open a file or a block device for direct I/O and return its id.

With create_bytes the file must not exist: it is made with that size, and its space is allocated, so that a full disk is
ENOSPC here and not later; when that fails no file is left. Its directory is not flushed. Its owner alone may use it.

With descriptor the file or device that this descriptor has open is opened, whatever the path names meanwhile; the path
is for messages.

A block device that is to be written is claimed: EBUSY where it is mounted, or claimed by another program.

Raises IoError (EINVAL where the file system cannot do direct I/O) and ValueError.)")
        .def("size", &Engine::size, "file"_a, ReleaseLock(), "The size in bytes of an open file or block device.")
        .def(
            "read",
            [](Engine& engine, const std::vector<SegmentTuple>& segments, bool urgent) {
                return submit(engine, Direction::read, segments, urgent);
            },
            "segments"_a, py::kw_only(), "urgent"_a = true,
            R"(Start reading each segment's bytes into its memory.

Blocks that are urgent go before waiting blocks that are not, in the order of the calls within each class; after 16
urgent blocks in a row one of the others goes, so that none waits for ever. Reads are urgent unless told otherwise,
because somebody waits for what they bring.

A read that meets the end of its file fails with ENODATA. Raises ValueError, before anything is started, for a segment
that is misaligned, negative or null or names no open file, and RuntimeError when the engine is closed.)")
        .def(
            "write",
            [](Engine& engine, const std::vector<SegmentTuple>& segments, bool urgent) {
                return submit(engine, Direction::write, segments, urgent);
            },
            "segments"_a, py::kw_only(), "urgent"_a = false,
            R"(Start writing each segment's memory to its file. `urgent` is as for `read`, and so are the errors.

What was written is durable only after `wait` and then `flush`.)")
        .def(
            "read_summed",
            [](Engine& engine, const std::vector<std::vector<SegmentTuple>>& ranges, bool urgent) {
                return summed(engine, Direction::read, ranges, urgent);
            },
            "ranges"_a, py::kw_only(), "urgent"_a = true,
            R"(Read ranges, wait for them, and return the `checksum` of each.

A range is the segments of which it consists, in order. The calling thread sums each block while others are under way,
in the order in which they arrive, so that checking what was read takes little time beyond reading it. Raises as `read`
and `wait`; nothing is in flight then.)")
        .def(
            "write_summed",
            [](Engine& engine, const std::vector<std::vector<SegmentTuple>>& ranges, bool urgent) {
                return summed(engine, Direction::write, ranges, urgent);
            },
            "ranges"_a, py::kw_only(), "urgent"_a = false,
            "Write ranges, wait for them, and return the `checksum` of each, taken while the drive writes. As "
            "`read_summed`.")
        .def("flush", &Engine::flush, "file"_a, ReleaseLock(),
             R"(Make the finished writes of a file durable (fdatasync), waiting for the drive.

Raises IoError. A failed flush is never retried: what the kernel dropped cannot be flushed any more, so every later
flush of the same file raises the same error.)")
        .def("close_file", &Engine::close_file, "file"_a, ReleaseLock(),
             "Wait for what is in flight on a file, then close it. Raises IoError, and ValueError for an unknown id.")
        .def("close", &Engine::close, ReleaseLock(),
             "Wait for everything in flight, then close all files. Closing twice is nothing.");
}

}  // namespace ssdplan
