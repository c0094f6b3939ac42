/* The numbers of the envelope, and the state of the module. */

#ifndef TIDELOG_ENVELOPE_SHARED_H
#define TIDELOG_ENVELOPE_SHARED_H

#include "../log/_arguments.h"

#define FIXED_BYTES 24
#define HEADER_BYTES 6
#define VERSION 1
#define HAS_KEY 1
#define DELIVER_AT 3

typedef struct {
    PyObject *input_error;
    PyObject *data_error;
} EnvelopeState;

#endif
