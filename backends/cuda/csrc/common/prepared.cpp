// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Prepared calls as a Python type of its own: pybind11's dispatch would cost more than what is saved.
#include "common/prepared.h"

#include "common/queue.h"
#include "common/workspace.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <structmember.h>
#include <vector>

namespace py = pybind11;

namespace ted {

namespace {

std::map<std::string, Preparable>& offered() {
  static std::map<std::string, Preparable> all;
  return all;
}

// Where a call finds PyTorch: its current stream, and memory.
struct Surroundings {
  py::object stream_of;  // (device index) -> address
  py::list direct;   // te_dispatch.ops.alloc.direct: [(shape, strides, dtype) -> tensor or None, () -> index or None]
  py::object empty;  // te_dispatch.ops.alloc.empty: (role, shape, dtype, device) -> tensor
};

struct Output {
  py::object role, shape, strides, dtype, device;
  std::vector<int> words;  // that take its address
  bool workspace = false;
  int64_t offset = 0;  // in the workspace that is kept
};

// What a call returns, as a tree: an output, a tensor that was given, a constant, a tuple (or a NamedTuple) of such, or
// a record, whose attributes they become.
struct Result {
  enum Kind { kOutput, kGiven, kConstant, kTuple, kRecord } kind;
  size_t index = 0;  // kOutput, kGiven
  py::object object;  // the constant, or the type
  std::vector<py::object> names;
  std::vector<Result> parts;
};

struct Call {
  std::string name;
  Preparable function;
  std::vector<Word> words;
  std::vector<std::vector<int>> inputs;  // words that take a given tensor's address
  std::vector<Output> outputs;
  Result result;
  std::vector<std::pair<int, int64_t>> aligned;  // words, and what they are multiples of, or nothing is done
  int device = 0;
  int64_t workspace = 0;  // bytes of all workspace; 0 also where it is too large to be kept
  py::object index, keep;
  Surroundings around;
};

struct Prepared {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  Call* call;
};

// A word of a constant, which must fit the argument that takes it.
Word word_of(const Call& call, size_t position, py::handle value) {
  const bool any = call.function.kinds.empty();
  const char kind = any ? (PyFloat_Check(value.ptr()) ? 'f' : 'l') : call.function.kinds[position];
  const auto refuse = [&](const char* expected) {
    throw std::invalid_argument(call.name + ": argument " + std::to_string(position) + ": got " +
                                py::repr(value).cast<std::string>() + ", expected " + expected);
  };
  Word word{};
  if (kind == 'f') {
    if (!PyFloat_Check(value.ptr()) && !PyLong_Check(value.ptr())) refuse("a number");
    word.real = PyFloat_AsDouble(value.ptr());
  } else {
    if (!PyLong_Check(value.ptr())) refuse("an integer");
    const long long integer = PyLong_AsLongLong(value.ptr());
    if (kind == 'i' && integer != static_cast<int>(integer)) refuse("an integer of 32 bits");
    word.integer = integer;
  }
  if (PyErr_Occurred()) throw py::error_already_set();
  return word;
}

int position_in(const Call& call, int position) {
  const bool known = position >= 2 && static_cast<size_t>(position) < call.words.size();
  if (!known || (!call.function.kinds.empty() && call.function.kinds[position] != 'l'))
    throw std::invalid_argument(call.name + ": argument " + std::to_string(position) + " takes no address");
  return position;
}

Result result_of(const Call& call, const py::tuple& spec) {
  Result result;
  const std::string kind = spec[0].cast<std::string>();
  if (kind == "made" || kind == "given") {
    result.kind = kind == "made" ? Result::kOutput : Result::kGiven;
    result.index = spec[1].cast<size_t>();
    if (result.index >= (kind == "made" ? call.outputs.size() : call.inputs.size()))
      throw std::invalid_argument(call.name + ": the result names tensor " + std::to_string(result.index));
    if (kind == "made" && call.outputs[result.index].workspace)
      throw std::invalid_argument(call.name + ": the result names workspace");
    return result;
  }
  result.object = spec[1];
  if (kind == "constant") {
    result.kind = Result::kConstant;
    return result;
  }
  if (!PyType_Check(result.object.ptr())) throw std::invalid_argument(call.name + ": the result's type is none");
  result.kind = kind == "tuple" ? Result::kTuple : Result::kRecord;
  for (py::handle part : spec[2].cast<py::tuple>()) result.parts.push_back(result_of(call, part.cast<py::tuple>()));
  if (result.kind == Result::kTuple) {
    if (!PyType_FastSubclass(reinterpret_cast<PyTypeObject*>(result.object.ptr()), Py_TPFLAGS_TUPLE_SUBCLASS))
      throw std::invalid_argument(call.name + ": the result's type is no tuple");
    return result;
  }
  for (py::handle name : spec[3].cast<py::tuple>()) result.names.push_back(py::reinterpret_borrow<py::object>(name));
  if (result.names.size() != result.parts.size())
    throw std::invalid_argument(call.name + ": the record has other names than parts");
  return result;
}

PyObject* text_data_ptr() {
  static PyObject* text = PyUnicode_InternFromString("data_ptr");
  return text;
}

// The address of a tensor; 0 for None. False where Python has an error set.
bool address_of(PyObject* tensor, int64_t& address) {
  if (tensor == Py_None) {
    address = 0;
    return true;
  }
  PyObject* answer = PyObject_VectorcallMethod(text_data_ptr(), &tensor, 1, nullptr);
  if (answer == nullptr) return false;
  address = static_cast<int64_t>(PyLong_AsUnsignedLongLong(answer));
  Py_DECREF(answer);
  return !(address == -1 && PyErr_Occurred());
}

// PyTorch's entry for the current device; None where `empty` has to be asked. Null: Python has an error set.
PyObject* direct_entry(const Call& call) {
  PyObject* const list = call.around.direct.ptr();
  if (PyList_GET_SIZE(list) != 2 || PyList_GET_ITEM(list, 0) == Py_None) return Py_NewRef(Py_None);
  PyObject* const current = PyList_GET_ITEM(list, 1);
  if (current == Py_None) return Py_NewRef(PyList_GET_ITEM(list, 0));
  PyObject* answer = PyObject_CallNoArgs(current);
  if (answer == nullptr) return nullptr;
  const long index = PyLong_AsLong(answer);
  Py_DECREF(answer);
  if (index == -1 && PyErr_Occurred()) return nullptr;
  return Py_NewRef(index == call.device ? PyList_GET_ITEM(list, 0) : Py_None);
}

// Workspace for a call: a new reference to what is kept for the stream; None where every piece is to be allocated, as
// under capture, because a graph may be replayed on another stream than the one that works on what is kept. Null:
// Python has an error set.
PyObject* kept(const Call& call, uintptr_t stream, PyObject* direct, int64_t& address) {
  if (call.workspace == 0 || direct == Py_None || capturing(stream)) return Py_NewRef(Py_None);
  const auto holds = [](const Output& output) { return output.workspace; };
  const Output& some = *std::find_if(call.outputs.begin(), call.outputs.end(), holds);
  return kept_workspace(call.device, stream, call.workspace, call.around.empty.ptr(), some.device.ptr(), address);
}

// A new reference, or null with Python's error set.
PyObject* allocate(const Output& output, PyObject* direct, const Surroundings& around) {
  if (direct != Py_None) {
    PyObject* given[] = {nullptr, output.shape.ptr(), output.strides.ptr(), output.dtype.ptr()};
    return PyObject_Vectorcall(direct, given + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  }
  PyObject* given[] = {nullptr, output.role.ptr(), output.shape.ptr(), output.dtype.ptr(), output.device.ptr()};
  return PyObject_Vectorcall(around.empty.ptr(), given + 1, 4 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
}

// A new reference, or null with Python's error set.
PyObject* build(const Result& result, PyObject* const* given, const std::vector<py::object>& made) {
  switch (result.kind) {
    case Result::kOutput: return made[result.index].inc_ref().ptr();
    case Result::kGiven: return Py_NewRef(given[result.index]);
    case Result::kConstant: return result.object.inc_ref().ptr();
    default: break;
  }
  auto* type = reinterpret_cast<PyTypeObject*>(result.object.ptr());
  const auto count = static_cast<Py_ssize_t>(result.parts.size());
  const bool tuple = result.kind == Result::kTuple;
  PyObject* whole = type == &PyTuple_Type ? PyTuple_New(count) : type->tp_alloc(type, tuple ? count : 0);
  if (whole == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* part = build(result.parts[i], given, made);
    if (part != nullptr && tuple) {
      PyTuple_SET_ITEM(whole, i, part);
      continue;
    }
    const bool set = part != nullptr && PyObject_SetAttr(whole, result.names[i].ptr(), part) == 0;
    Py_XDECREF(part);
    if (!set) {
      Py_DECREF(whole);
      return nullptr;
    }
  }
  return whole;
}

PyObject* cuda_error_type = nullptr;

// What pybind11 makes of exceptions of bound functions.
PyObject* told() {
  try {
    throw;
  } catch (const CudaError& error) {
    PyErr_SetString(cuda_error_type, error.what());
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

bool misaligned(const Call& call, const Word* words) {
  int64_t low = 0;
  for (const auto& [position, alignment] : call.aligned) low |= words[position].integer & (alignment - 1);
  return low != 0;
}

PyObject* enter(const Call& call, PyObject* const* given, size_t count) {
  if (count != call.inputs.size())
    return PyErr_Format(PyExc_TypeError, "%s: got %zu tensors, expected %zu", call.name.c_str(), count, call.inputs.size());
  constexpr size_t kUsual = 64;
  Word few[kUsual];
  std::unique_ptr<Word[]> many;
  const size_t size = call.words.size();
  Word* words = few;
  if (size > kUsual) {
    many.reset(new Word[size]);
    words = many.get();
  }
  std::copy(call.words.begin(), call.words.end(), words);
  PyObject* index[] = {nullptr, call.index.ptr()};
  PyObject* stream = PyObject_Vectorcall(call.around.stream_of.ptr(), index + 1, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  if (stream == nullptr) return nullptr;
  words[1].integer = static_cast<int64_t>(PyLong_AsUnsignedLongLong(stream));
  Py_DECREF(stream);
  for (size_t i = 0; i < count; ++i) {
    int64_t address = 0;
    if (!address_of(given[i], address)) return nullptr;
    for (int position : call.inputs[i]) words[position].integer = address;
  }
  if (misaligned(call, words)) Py_RETURN_NOTIMPLEMENTED;  // before anything is allocated: outputs' words are 0 yet
  const auto direct = py::reinterpret_steal<py::object>(call.outputs.empty() ? Py_NewRef(Py_None) : direct_entry(call));
  if (!direct) return nullptr;
  int64_t base = 0;
  const auto workspace = py::reinterpret_steal<py::object>(kept(call, words[1].integer, direct.ptr(), base));
  if (!workspace) return nullptr;
  std::vector<py::object> made;
  made.reserve(call.outputs.size());
  for (const Output& output : call.outputs) {
    if (output.workspace && !workspace.is_none()) {
      for (int position : output.words) words[position].integer = base + output.offset;
      made.emplace_back();
      continue;
    }
    PyObject* tensor = allocate(output, direct.ptr(), call.around);
    if (tensor == nullptr) return nullptr;
    made.push_back(py::reinterpret_steal<py::object>(tensor));
    int64_t address = 0;
    if (!address_of(tensor, address)) return nullptr;
    for (int position : output.words) words[position].integer = address;
  }
  if (misaligned(call, words)) Py_RETURN_NOTIMPLEMENTED;
  try {
    call.function.call(words, size);
  } catch (...) {
    return told();
  }
  return build(call.result, given, made);
}

PyObject* vectorcall(PyObject* self, PyObject* const* given, size_t flags, PyObject* names) {
  const Call& call = *reinterpret_cast<Prepared*>(self)->call;
  if (names != nullptr && PyTuple_GET_SIZE(names) > 0)
    return PyErr_Format(PyExc_TypeError, "%s: takes tensors by position only", call.name.c_str());
  return enter(call, given, static_cast<size_t>(PyVectorcall_NARGS(flags)));
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Prepared*>(self)->call;
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* type_of_prepared() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Prepared, vectorcall), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc)},
      {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
      {Py_tp_members, members},
      {Py_tp_doc, const_cast<char*>("A native call: tensors in, the operator's result out; NotImplemented where an "
                                    "address does not lie as the call was prepared for: then nothing was done.")},
      {0, nullptr},
  };
  static PyType_Spec spec = {"te_dispatch_cuda._native.Prepared", sizeof(Prepared), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  static PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  return type;
}

// A place for it in what is kept, a multiple of 256 as PyTorch's allocator gives them.
void reserve(Call& call, Output& output) {
  int64_t bytes = output.dtype.attr("itemsize").cast<int64_t>();
  for (py::handle size : output.shape) bytes *= size.cast<int64_t>();
  output.workspace = true;
  output.offset = call.workspace;
  call.workspace += ceil_div(bytes, 256) * 256;
}

// constants: every argument from the device on, a placeholder where an address goes. given: for each tensor of a call,
// the arguments that take its address. made: (role, shape, strides, dtype, device, arguments that take its address).
// aligned: arguments, and the powers of two that their addresses are multiples of.
py::object prepare(const std::string& name, const py::tuple& around, const py::list& constants,
                   std::vector<std::vector<int>> given, const py::list& made, const py::tuple& result,
                   const std::vector<std::pair<int, int64_t>>& aligned, py::object keep) {
  const auto found = offered().find(name);
  if (found == offered().end()) throw std::invalid_argument("name: got " + name + ", which no function is offered as");
  auto call = std::make_unique<Call>();
  call->name = name;
  call->function = found->second;
  const size_t expected = call->function.kinds.size();
  if (constants.size() < 2 || (expected != 0 && constants.size() != expected))
    throw std::invalid_argument("constants: got " + std::to_string(constants.size()) + " for " + name + ", expected " +
                                std::to_string(expected));
  for (size_t i = 0; i < constants.size(); ++i) call->words.push_back(word_of(*call, i, constants[i]));
  call->around = {around[0], around[1].cast<py::list>(), around[2]};
  call->device = static_cast<int>(call->words[0].integer);
  call->index = constants[0];
  for (const auto& positions : given)
    for (int position : positions) position_in(*call, position);
  call->inputs = std::move(given);
  for (py::handle entry : made) {
    const auto parts = entry.cast<py::tuple>();
    Output output{parts[0], parts[1], parts[2], parts[3], parts[4], parts[5].cast<std::vector<int>>()};
    for (int position : output.words) position_in(*call, position);
    if (parts[0].cast<std::string>() == "workspace") reserve(*call, output);
    call->outputs.push_back(std::move(output));
  }
  if (call->workspace > kMostKept) call->workspace = 0;
  call->result = result_of(*call, result);
  for (const auto& [position, alignment] : aligned) {
    if (alignment < 1 || (alignment & (alignment - 1)) != 0)
      throw std::invalid_argument("aligned: got " + std::to_string(alignment) + ", expected a power of two");
    call->aligned.push_back({position_in(*call, position), alignment});
  }
  call->keep = std::move(keep);
  auto* type = reinterpret_cast<PyTypeObject*>(type_of_prepared());
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) throw py::error_already_set();
  reinterpret_cast<Prepared*>(self)->vectorcall = &vectorcall;
  reinterpret_cast<Prepared*>(self)->call = call.release();
  return py::reinterpret_steal<py::object>(self);
}

Bindings prepared(+[](py::module_& m) {
  m.attr("Prepared") = py::reinterpret_borrow<py::object>(type_of_prepared());
  m.def("prepare", &prepare);
  m.def("release_workspaces", &release_workspaces);
  cuda_error_type = py::object(m.attr("CudaError")).release().ptr();  // for good
});

}  // namespace

void offer(const std::string& name, const Preparable& function) { offered()[name] = function; }

}  // namespace ted
