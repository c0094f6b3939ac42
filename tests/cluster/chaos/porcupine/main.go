// Asks Porcupine whether partitions are linearizable logs, and objects of engines linearizable registers. In:
// {"name": [operations]}; out: {"name": "ok"}.
//
// The state of a log is its next offset. An append is possible where the log ends, a question for the end answers where
// it is. Every client sees one log, whoever owns it: an owner that was replaced and answers late is found out.
// The state of a register is the seq of its version. A put is applied if that is the one that it asks for (-1: any).
package main

import (
	"encoding/json"
	"os"
	"time"

	"github.com/anishathalye/porcupine"
)

type operation struct {
	Client int    `json:"client"`
	Call   int64  `json:"call"`
	Return int64  `json:"return"`
	Kind   string `json:"kind"`
	Offset int64  `json:"offset"`

	Match     int64 `json:"match"`
	IsApplied bool  `json:"isApplied"`
}

var model = porcupine.Model{
	Init: func() interface{} { return int64(0) },
	Step: func(state, input, output interface{}) (bool, interface{}) {
		now, asked := state.(int64), input.(operation)
		switch asked.Kind {
		case "append":
			return asked.Offset == now, now + 1
		case "put":
			if asked.Match >= 0 && asked.Match != now {
				return !asked.IsApplied, now
			}
			return asked.IsApplied, asked.Offset
		default: // where a log ends, and what a register has
			return asked.Offset == now, now
		}
	},
}

func main() {
	var logs map[string][]operation
	if err := json.NewDecoder(os.Stdin).Decode(&logs); err != nil {
		panic(err)
	}
	results := map[string]string{}
	for name, operations := range logs {
		var history []porcupine.Operation
		for _, one := range operations {
			history = append(history, porcupine.Operation{
				ClientId: one.Client, Input: one, Call: one.Call, Output: nil, Return: one.Return,
			})
		}
		results[name] = string(porcupine.CheckOperationsTimeout(model, history, 5*time.Minute))
	}
	json.NewEncoder(os.Stdout).Encode(results)
}
