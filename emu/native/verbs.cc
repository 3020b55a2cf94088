// Names of the verbs' statuses, and the exception that carries one to Python.
#include "verbs.h"

namespace verbs {

const char* status_name(Status status) {
  switch (status) {
    case Status::kSuccess: return "IBV_WC_SUCCESS";
    case Status::kLocQpOpErr: return "IBV_WC_LOC_QP_OP_ERR";
    case Status::kLocProtErr: return "IBV_WC_LOC_PROT_ERR";
    case Status::kWrFlushErr: return "IBV_WC_WR_FLUSH_ERR";
    case Status::kRemInvReqErr: return "IBV_WC_REM_INV_REQ_ERR";
    case Status::kRemAccessErr: return "IBV_WC_REM_ACCESS_ERR";
    case Status::kRetryExcErr: return "IBV_WC_RETRY_EXC_ERR";
  }
  return "IBV_WC_GENERAL_ERR";
}

const char* status_meaning(Status status) {
  switch (status) {
    case Status::kSuccess: return "done";
    case Status::kLocQpOpErr: return "the work request itself is malformed";
    case Status::kLocProtErr: return "a local address lies outside the registered memory";
    case Status::kWrFlushErr: return "flushed after an earlier error";
    case Status::kRemInvReqErr: return "the owner cannot understand the message";
    case Status::kRemAccessErr: return "the remote key, its bounds or its access rights do not allow it";
    case Status::kRetryExcErr: return "the memory node does not answer; it died, or was stopped";
  }
  return "unknown status";
}

const char* opcode_name(Opcode opcode) {
  switch (opcode) {
    case Opcode::kRead: return "READ";
    case Opcode::kWrite: return "WRITE";
    case Opcode::kPack: return "PACK";
  }
  return "unknown operation";
}

namespace {

PyObject* work_fault;  // owned by the module; never released, so that a late exception finds it

void translate_fault(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const WorkFault& fault) {
    PyErr_SetObject(work_fault, nb::make_tuple(status_name(fault.status), fault.what()).ptr());
  }
}

}  // namespace
}  // namespace verbs

void register_verbs(nb::module_& m) {
  const std::string name = std::string(PyModule_GetName(m.ptr())) + ".WorkFault";
  verbs::work_fault = PyErr_NewException(name.c_str(), PyExc_RuntimeError, nullptr);
  if (!verbs::work_fault) throw nb::python_error();
  m.attr("WorkFault") = nb::borrow(verbs::work_fault);
  nb::register_exception_translator(&verbs::translate_fault);
  verbs::register_ring(m);
  verbs::register_responder(m);
  verbs::register_requester(m);
}
