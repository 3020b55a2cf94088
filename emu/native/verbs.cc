// Names of the verbs' statuses, and the exception that carries one to Python.
#include "verbs.h"

namespace verbs {

const char* status_name(Status status) {
  switch (status) {
    case Status::kSuccess: return "IBV_WC_SUCCESS";
    case Status::kLocLenErr: return "IBV_WC_LOC_LEN_ERR";
    case Status::kLocQpOpErr: return "IBV_WC_LOC_QP_OP_ERR";
    case Status::kLocEecOpErr: return "IBV_WC_LOC_EEC_OP_ERR";
    case Status::kLocProtErr: return "IBV_WC_LOC_PROT_ERR";
    case Status::kWrFlushErr: return "IBV_WC_WR_FLUSH_ERR";
    case Status::kMwBindErr: return "IBV_WC_MW_BIND_ERR";
    case Status::kBadRespErr: return "IBV_WC_BAD_RESP_ERR";
    case Status::kLocAccessErr: return "IBV_WC_LOC_ACCESS_ERR";
    case Status::kRemInvReqErr: return "IBV_WC_REM_INV_REQ_ERR";
    case Status::kRemAccessErr: return "IBV_WC_REM_ACCESS_ERR";
    case Status::kRemOpErr: return "IBV_WC_REM_OP_ERR";
    case Status::kRetryExcErr: return "IBV_WC_RETRY_EXC_ERR";
    case Status::kRnrRetryExcErr: return "IBV_WC_RNR_RETRY_EXC_ERR";
    case Status::kLocRddViolErr: return "IBV_WC_LOC_RDD_VIOL_ERR";
    case Status::kRemInvRdReqErr: return "IBV_WC_REM_INV_RD_REQ_ERR";
    case Status::kRemAbortErr: return "IBV_WC_REM_ABORT_ERR";
    case Status::kInvEecnErr: return "IBV_WC_INV_EECN_ERR";
    case Status::kInvEecStateErr: return "IBV_WC_INV_EEC_STATE_ERR";
    case Status::kFatalErr: return "IBV_WC_FATAL_ERR";
    case Status::kRespTimeoutErr: return "IBV_WC_RESP_TIMEOUT_ERR";
    case Status::kGeneralErr: return "IBV_WC_GENERAL_ERR";
  }
  return "IBV_WC_GENERAL_ERR";
}

// In plain words, of what can be met on a reliable connection; the others are the device's own affair.
const char* status_meaning(Status status) {
  switch (status) {
    case Status::kSuccess: return "done";
    case Status::kLocLenErr: return "a message is longer than the memory it goes to, or than the port allows";
    case Status::kLocQpOpErr: return "the work request itself is malformed";
    case Status::kLocProtErr: return "a local address lies outside the registered memory";
    case Status::kWrFlushErr: return "flushed after an earlier error";
    case Status::kBadRespErr: return "the answer was not to this request";
    case Status::kLocAccessErr: return "the other side did what this side's memory does not allow";
    case Status::kRemInvReqErr: return "the owner cannot understand the message";
    case Status::kRemAccessErr: return "the remote key, its bounds or its access rights do not allow it";
    case Status::kRemOpErr: return "the other side could not complete it";
    case Status::kRetryExcErr: return "the memory node does not answer; it died, was stopped, or cannot be reached";
    case Status::kRnrRetryExcErr: return "the memory node took no message for too long";
    case Status::kFatalErr: return "the device failed";
    case Status::kRespTimeoutErr: return "no answer in time";
    default: return "the device reported an error";
  }
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
  verbs::register_device(m);
  verbs::register_rc(m);
  verbs::register_rc_owner(m);
}
