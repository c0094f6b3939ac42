/* Microseconds since 1970 to a datetime in UTC. */

#ifndef TIDELOG_ENVELOPE_TIME_H
#define TIDELOG_ENVELOPE_TIME_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <datetime.h>
#include <stdint.h>

#include "_envelope_parse.h"

#define MICROSECONDS_A_DAY INT64_C(86400000000)

/* The last timestamp that was built: neighbours in a log often carry the same one, and nearly always the same day. */
typedef struct {
    PyObject *datetime;
    int64_t timestamp_us;
    int64_t day;
    int year, month, month_day;
} Moment;

/* Years counted from March end with the leap day, which makes months a straight line: (153 * month + 2) / 5 days have
   passed before the month with that number (March is 0). 400 such years always have 146097 days. */
static void moment_set_day(Moment *moment, int64_t days_since_1970) {
    int64_t days = days_since_1970 + 719468; /* since 0000-03-01 */
    int64_t cycle = days / 146097;           /* never negative: year 1 is the earliest */
    int64_t day_of_cycle = days % 146097;
    int64_t year_of_cycle = (day_of_cycle - day_of_cycle / 1460 + day_of_cycle / 36524 - day_of_cycle / 146096) / 365;
    int64_t day_of_year = day_of_cycle - (365 * year_of_cycle + year_of_cycle / 4 - year_of_cycle / 100);
    int month = (int)((5 * day_of_year + 2) / 153);
    moment->day = days_since_1970;
    moment->month_day = (int)day_of_year - (153 * month + 2) / 5 + 1;
    moment->month = month < 10 ? month + 3 : month - 9;
    moment->year = (int)(cycle * 400 + year_of_cycle) + (moment->month <= 2);
}

/* A new reference to the UTC datetime of a timestamp that a datetime can hold. */
static PyObject *moment_get(Moment *moment, int64_t timestamp_us) {
    if (moment->datetime != NULL && moment->timestamp_us == timestamp_us) {
        return Py_NewRef(moment->datetime);
    }
    int64_t day = timestamp_us / MICROSECONDS_A_DAY;
    int64_t rest_us = timestamp_us % MICROSECONDS_A_DAY;
    if (rest_us < 0) {
        rest_us += MICROSECONDS_A_DAY;
        day--;
    }
    if (moment->datetime == NULL || moment->day != day) {
        moment_set_day(moment, day);
    }
    int microsecond = (int)(rest_us % 1000000);
    int second = (int)(rest_us / 1000000);
    PyObject *datetime = PyDateTimeAPI->DateTime_FromDateAndTime(
        moment->year, moment->month, moment->month_day, second / 3600, second / 60 % 60, second % 60, microsecond,
        PyDateTime_TimeZone_UTC, PyDateTimeAPI->DateTimeType);
    if (datetime != NULL) {
        Py_XSETREF(moment->datetime, Py_NewRef(datetime));
        moment->timestamp_us = timestamp_us;
    }
    return datetime;
}

#endif
