/* A client of Kafka's protocol that costs next to nothing: the same request, over many connections, again and again.

   kafka_load HOST PORT REQUEST-FILE CONNECTIONS IN-FLIGHT SECONDS

   Each connection keeps IN-FLIGHT requests on their way, and sends one for each answer. It prints how many were answered in
   that time, and the seconds of CPU that it used itself. bench/kafka.py compiles and runs it. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    int socket;
    int got;        /* bytes of the next answer's size that are there */
    uint32_t size;  /* of that answer; what is left of it once all four bytes are there */
} Connection;

static char *request;
static size_t request_bytes;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static double now(void) {
    struct timespec moment;
    clock_gettime(CLOCK_MONOTONIC, &moment);
    return moment.tv_sec + moment.tv_nsec / 1e9;
}

/* Requests are small and few are in flight: the socket has room for them. */
static void send_requests(Connection *connection, int count) {
    for (; count > 0; count--) {
        size_t sent = 0;
        while (sent < request_bytes) {
            ssize_t done = send(connection->socket, request + sent, request_bytes - sent, 0);
            if (done < 0)
                fail("send");
            sent += (size_t)done;
        }
    }
}

/* How many answers end in these bytes. */
static int count_answers(Connection *connection, const unsigned char *data, ssize_t size) {
    int answers = 0;
    while (size > 0) {
        if (connection->got < 4) {
            connection->size = connection->size << 8 | *data++;
            connection->got++;
            size--;
            continue;
        }
        ssize_t part = size < (ssize_t)connection->size ? size : (ssize_t)connection->size;
        data += part;
        size -= part;
        connection->size -= (uint32_t)part;
        if (connection->size == 0) {
            connection->got = 0;
            answers++;
        }
    }
    return answers;
}

static void read_request(const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0)
        fail(path);
    request_bytes = (size_t)ftell(file);
    rewind(file);
    request = malloc(request_bytes);
    if (request == NULL || fread(request, 1, request_bytes, file) != request_bytes)
        fail(path);
    fclose(file);
}

static int connect_to(const char *host, const char *port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port))};
    int one = 1, made = socket(AF_INET, SOCK_STREAM, 0);
    if (made < 0 || inet_pton(AF_INET, host, &address.sin_addr) != 1)
        fail("address");
    if (connect(made, (struct sockaddr *)&address, sizeof address) < 0)
        fail("connect");
    setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return made;
}

int main(int count, char **arguments) {
    static unsigned char received[1 << 16];
    if (count != 7) {
        fprintf(stderr, "kafka_load HOST PORT REQUEST-FILE CONNECTIONS IN-FLIGHT SECONDS\n");
        return 2;
    }
    read_request(arguments[3]);
    int connections = atoi(arguments[4]), in_flight = atoi(arguments[5]), poll = epoll_create1(0);
    Connection *all = calloc((size_t)connections, sizeof *all);
    if (all == NULL || poll < 0)
        fail("epoll");
    for (int i = 0; i < connections; i++) {
        all[i].socket = connect_to(arguments[1], arguments[2]);
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &all[i]};
        if (epoll_ctl(poll, EPOLL_CTL_ADD, all[i].socket, &event) < 0)
            fail("epoll_ctl");
    }
    for (int i = 0; i < connections; i++)
        send_requests(&all[i], in_flight);
    long answers = 0;
    double begin = now(), end = begin + atof(arguments[6]);
    while (now() < end) {
        struct epoll_event ready[256];
        int found = epoll_wait(poll, ready, 256, 100);
        for (int i = 0; i < found; i++) {
            Connection *connection = ready[i].data.ptr;
            ssize_t size = recv(connection->socket, received, sizeof received, 0);
            if (size <= 0)
                fail("recv");
            int done = count_answers(connection, received, size);
            answers += done;
            send_requests(connection, done);
        }
    }
    double seconds = now() - begin;
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    printf("%.1f %.3f\n", (double)answers / seconds,
           (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) + (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6);
    return 0;
}
